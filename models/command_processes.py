"""The processes of a command: one, or as many as its target's layers are split over."""

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

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


def run_in_processes(count: int, overrides: Sequence[str]) -> NoReturn:
    """Run the command of this process in `count` processes, as torchrun does, and exit as the first that fails.

    `overrides` follow its arguments.
    """
    # deferred: slow to import
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    for name in ("agent.server.api", "multiprocessing.api"):  # a process tells its error itself
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        run_id=str(os.getpid()),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)(*sys.orig_argv[1:], *overrides)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A signal is a negative number, of which shells make 128 more than the signal.
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)
