"""The start of a run: its folder, and where it stands."""

import logging
from pathlib import Path

from conf.entry import config_yaml
from models.errors import UserError
from models.lock import hold
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.distributed.torchrun import restarted
from train.extension import refuse_early
from train.run_dir import claim, clear
from train.state import State, flat

LEASE_S = 180.0  # longer than NFSv4 keeps the lock of a node that vanished: 90 s, and 90 s of grace
log = logging.getLogger(__name__)


def open_run(conf: TrainConf, parallel: Parallel) -> State:
    """Claim the run's folder and find out where the run stands, before anything slow is done."""
    folder = Path(conf.output_dir) / conf.run_name
    claim(folder)
    if parallel.main:  # before what another run writes is read or removed
        hold(folder, patience_s=LEASE_S if restarted() else 0.0)
    # Each node's launcher counts its own restarts, and starts anew when another's worker dies.
    if not conf.resume and not parallel.anywhere(restarted()) and parallel.main:
        clear(folder)
    parallel.wait()
    route = parallel.accelerator.device.type
    state = State(folder, flat(conf) | {"device.route": route})
    state.find()
    refuse_other_states(state, parallel)
    if state.progress.step:
        refuse_early(state, conf.optim, multiple=conf.renewal)
        log.info("%s continues after step %d", folder, state.progress.step)
    parallel.wait()
    if parallel.main:
        state.sweep()
        (folder / "config.yaml").write_text(config_yaml(conf))
    return state


def refuse_other_states(state: State, parallel: Parallel) -> None:
    """Raise UserError on every process unless all of them would continue after the same step.

    A network file system may show one node what was there a while ago.
    """
    step = state.progress.step
    if not parallel.agree(step):
        raise UserError(
            f"output_dir: must show every process the same states, got step {step} here and "
            f"another elsewhere in {state.states}; start again, or use a file system that all share"
        )
