"""The order of a run's checks before a model is loaded; its folder is checked in run/folder.py."""

from typing import TYPE_CHECKING

from train.config.run import TrainConf

if TYPE_CHECKING:  # a mistake is answered before PyTorch is imported, which takes seconds
    from train.planning.device_fit import FittedRun


def preflight(conf: TrainConf, *, is_warmup: bool = False) -> "FittedRun":
    """Check a run, connect its processes, and return it fitted to their devices.

    A warm-up sends nothing to a tracker, and may run where the data is not. Raise UserError before a model is loaded.
    """
    conf.check_settings()

    from data.sources.training_rows import check_reachable

    if not is_warmup:
        conf.log.check_wandb()
        check_reachable(conf.data, conf.target, conf.draft.pretrained)

    from train.checks import build_run_parallel, check_inputs
    from train.first_lines import announce_data
    from train.planning.device_fit import fit_run

    preview = check_inputs(conf, reads_data=not is_warmup)
    if preview is not None:
        announce_data(conf, preview)
    trackers = [] if is_warmup else conf.log.list_trackers()
    return fit_run(conf, build_run_parallel(conf, trackers=trackers))
