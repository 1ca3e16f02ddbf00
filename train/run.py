"""The start of a run: its folder, and where it stands."""

import logging
from pathlib import Path

from accelerate import Accelerator

from conf.entry import config_yaml
from train.config import TrainConf
from train.disk import claim, clear
from train.state import State, flat

log = logging.getLogger(__name__)


def open_run(conf: TrainConf, accelerator: Accelerator) -> State:
    """Claim the run's folder and find out where the run stands, before anything slow is done."""
    folder = Path(conf.output_dir) / conf.run_name
    claim(folder)
    if accelerator.is_main_process and not conf.resume:
        clear(folder)
    accelerator.wait_for_everyone()
    here = {"processes": accelerator.num_processes, "device.route": accelerator.device.type}
    state = State(folder, flat(conf) | here)
    if state.find().step:
        log.info("%s continues after step %d", folder, state.progress.step)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state.sweep()
        (folder / "config.yaml").write_text(config_yaml(conf))
    return state
