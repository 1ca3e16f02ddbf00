"""Checks of a training run before a model is loaded, and its processes once they have passed."""

from functools import partial

from data.config import DataSource
from data.eval_prompts.prompts import read_prompt_rows
from data.features.compatibility import check_captured_data
from data.preview import Preview, check_and_read_first_rows, preview_rows
from infer.measure.context_limits import check_prompts
from models.device.device import Device
from models.errors import require, run_checks
from models.target.precision import build_device
from models.target.pretrained import check_pretrained
from train.config.run import TrainConf
from train.distributed.parallel import Parallel, build_parallel, check_parallel, check_target_split
from train.optim import check_optimizer


def check_run(conf: TrainConf, *, reads_data: bool = True) -> Preview | None:
    """Return a preview of the first rows of the data, or None without `reads_data`.

    Raise UserError for an invalid configuration, before a model is loaded. A warm-up reads no
    data.
    """
    conf.check_settings()
    check_parallel(
        conf.parallel,
        rows=conf.optim.rows_per_step,
        trains_target=conf.draft.trains_target,
        device=conf.device.name,
        optimizer=conf.optim.name.value,
    )
    require(
        conf.evaluation.prompts is not None
        or conf.held_out_prompts > 0
        or conf.data.source is DataSource.demo,
        "held_out_prompts: must be at least 1 if evaluation.prompts is not set, got 0; "
        "raise it or give evaluation.prompts=FILE",
    )
    checks = [
        partial(check_pretrained, conf.target),
        partial(check_pretrained, conf.draft.pretrained),
    ]
    preview = None
    if reads_data:
        conf.data.check_target(conf.target)
        preview = preview_rows(
            conf.data, conf.target, check_and_read_first_rows(conf.data, *checks)
        )
    else:
        run_checks(*checks)
    check_captured_data(conf.data, target=conf.target, draft=conf.draft, loss=conf.loss)
    check_target_split(conf.parallel, conf.target, device=conf.device.name)
    if conf.evaluation.prompts is not None:
        read_prompt_rows(conf.evaluation.prompts)
        check_prompts(conf.target, conf.evaluation)
    return preview


def build_run_parallel(conf: TrainConf, *, trackers: list[str]) -> Parallel:
    """Build the run's processes, after `check_run`; raise UserError for what they cannot do."""
    device = build_device(conf.device, conf.target)
    check_run_device(conf, device)
    return build_parallel(conf.parallel, device, trackers=trackers)


def check_run_device(conf: TrainConf, device: Device) -> None:
    """Raise UserError, before a model is loaded, if the device cannot do what the run needs."""
    check_optimizer(conf.optim, device)
    conf.data.check_row_length(device.length_multiple, on=device.instance_type)
