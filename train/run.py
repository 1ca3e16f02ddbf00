"""Start of a run: claim its folder and load its progress."""

import logging
from pathlib import Path

from conf.entry import config_to_yaml
from models.errors import UserError
from models.lock import acquire_lock
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.distributed.torchrun import is_restart
from train.extension import check_extension
from train.run_dir import create_run_dir, reset_run_dir
from train.state import RunState, flatten_config

LEASE_S = 180.0  # longer than NFSv4 keeps the lock of a node that vanished: 90 s, and 90 s of grace
log = logging.getLogger(__name__)


def open_run(conf: TrainConf, parallel: Parallel) -> RunState:
    """Claim the run's folder and load its progress, before anything slow is done."""
    folder = Path(conf.output_dir) / conf.run_name
    create_run_dir(folder)
    if parallel.is_main:  # before any file of a run in progress is read or removed
        acquire_lock(folder, timeout_s=LEASE_S if is_restart() else 0.0)
    # Each node's launcher counts its own restarts, and restarts when another node's worker dies.
    if not conf.resume and not parallel.any_rank(is_restart()) and parallel.is_main:
        reset_run_dir(folder)
    parallel.barrier()
    route = parallel.accelerator.device.type
    state = RunState(folder, flatten_config(conf) | {"device.route": route})
    state.load_progress()
    check_same_step(state, parallel)
    if state.progress.step:
        check_extension(state, conf.optim, multiple=conf.renewal_interval)
        log.info("%s continues after step %d", folder, state.progress.step)
    parallel.barrier()
    if parallel.is_main:
        state.remove_old_states()
        (folder / "config.yaml").write_text(config_to_yaml(conf))
    return state


def check_same_step(state: RunState, parallel: Parallel) -> None:
    """Check that all processes would continue after the same step; raise UserError on each if not.

    A network file system may show a node an outdated folder.
    """
    step = state.progress.step
    if not parallel.all_ranks_agree(step):
        raise UserError(
            f"output_dir: must show every process the same states, got step {step} here and "
            f"another elsewhere in {state.states_dir}; start again, or use a file system that all "
            "share"
        )
