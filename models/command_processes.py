"""The processes of a command: one, or as many as its target's layers are split over."""

import os
import threading
import time
from collections.abc import Sequence

from models.device.config import DeviceConf
from models.io.errors import require
from models.parallel.config import TensorConf
from models.parallel.torchrun import LAUNCHER_VARIABLE, check_launch, get_world_size
from models.targets.config import TargetConf

LAUNCHER_POLL_S = 1.0


def start_processes(
    parallel: TensorConf, device: DeviceConf, target: TargetConf, *, is_sweep: bool, overrides: Sequence[str] = ()
) -> None:
    """Run the command in the processes that split its target, and exit; return in each of them, or in a single one.

    The processes get the `overrides` too: what this one has chosen, so that each of them does not choose again.
    Raise UserError for a target that cannot be split, and for another number of launched processes.
    """
    tensor, launched = parallel.tensor, get_world_size()
    require(
        launched in (1, tensor),
        f"parallel.tensor: must be the number of launched processes, {launched}, got {tensor}; leave the launcher out",
    )
    if tensor == 1:
        return
    check_launch()
    check_split(tensor, device, target)
    if launched > 1:
        # Ours tells its number, because it may have been killed before this line; torchrun does not.
        launcher = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        threading.Thread(target=exit_with_launcher, args=(launcher,), daemon=True).start()
    else:
        require(not is_sweep, f"parallel.tensor: must be 1 in a sweep, got {tensor}; start the commands one by one")
        from models.parallel.launch import run_in_processes  # deferred: slow to import

        run_in_processes(tensor, overrides)


def exit_with_launcher(launcher: int) -> None:
    """Exit once the launcher has: one that is killed leaves its processes, which keep their devices."""
    while os.getppid() == launcher:
        time.sleep(LAUNCHER_POLL_S)
    os._exit(1)


def check_split(tensor: int, device: DeviceConf, target: TargetConf) -> None:
    """Raise UserError for a device or target that cannot be split; read only the target's config."""
    from models.parallel.tensor_parallel import check_native_split  # deferred: slow to import
    from models.targets.pretrained import build_meta_model

    require(
        device.is_native, f"parallel.tensor: must be 1 with device={device.name.name}, got {tensor}; take another route"
    )
    check_native_split(build_meta_model(target), tensor, remedy="choose another")
