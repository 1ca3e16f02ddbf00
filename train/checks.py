"""Checks of a run's models, data, processes and device, before a model is loaded."""

from functools import partial

from data.features.compatibility import check_captured_data
from data.preview import Preview, preview_data
from infer.measure.context_limits import check_prompts
from models.device.device import Device
from models.io.errors import run_checks
from models.targets.precision import build_device
from models.targets.pretrained import check_pretrained
from train.config.run import TrainConf
from train.distributed.build import build_parallel, check_parallel
from train.distributed.parallel import Parallel


def check_inputs(conf: TrainConf, *, reads_data: bool = True) -> Preview | None:
    """Check models, data and prompts, or raise UserError; return a preview of the data, None without `reads_data`."""
    check_parallel(conf)
    checks = [partial(check_pretrained, model) for model in (conf.target, conf.draft.pretrained)]
    preview = None
    if reads_data:
        conf.data.check_target(conf.target)
        preview = preview_data(conf.data, conf.target, *checks)
    else:
        run_checks(*checks)
    check_captured_data(conf.data, target=conf.target, draft=conf.draft, loss=conf.loss)
    check_prompts(conf.target, conf.evaluation)
    return preview


def build_run_parallel(conf: TrainConf, *, trackers: list[str]) -> Parallel:
    """Build the run's processes; raise UserError for what their device cannot do."""
    device = build_device(conf.device, conf.target)
    check_run_device(conf, device)
    return build_parallel(conf.parallel, device, trackers=trackers)


def check_run_device(conf: TrainConf, device: Device) -> None:
    """Raise UserError, before a model is loaded, if the device cannot do what the run needs."""
    conf.data.check_row_length(device.length_multiple, on=device.instance_type)
    conf.optim.check_route(device.name, is_lazy=device.lazy)  # which device=auto leaves open
