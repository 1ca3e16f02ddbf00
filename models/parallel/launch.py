"""Start a command again in several processes of this machine."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from models.parallel.torchrun import LAUNCHER_VARIABLE


def run_in_processes(count: int, overrides: Sequence[str] = ()) -> NoReturn:
    """Run the command of this process in `count` processes, as torchrun does, and exit as the first that fails.

    `overrides` follow its arguments.
    """
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
