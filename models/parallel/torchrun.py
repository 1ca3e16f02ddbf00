"""The launcher's environment: number of processes, restarts, and the rendezvous after one."""

import functools
import os
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Any

from models.io.errors import require

SCHEME = "attempt"  # URL scheme of our rendezvous
_connections = count()  # of this process
LAUNCHER_VARIABLE = "DRAFTSMITH_LAUNCHER"  # process number of our launcher
LAUNCH_VARIABLE = "DRAFTSMITH_LAUNCH"  # a name for a launch that a cluster repeats: a requeued job, restarted pods


def get_world_size() -> int:
    """Return the number of processes of this run, over all nodes."""
    return _read_env_int("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """Return the number of the run's processes on this node, 1 without a launcher."""
    return _read_env_int("LOCAL_WORLD_SIZE", 1)


def get_local_rank() -> int:
    """Return the number of this process on its node, 0 without a launcher."""
    return _read_env_int("LOCAL_RANK", 0)


def is_restart() -> bool:
    """Return True if the launcher restarted this run after one of its processes died."""
    return _read_env_int("TORCHELASTIC_RESTART_COUNT", 0) > 0


def identify_launch() -> str:
    """Return what all attempts of a launch have in common and other launches do not."""
    if name := os.environ.get(LAUNCH_VARIABLE):
        return name
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:  # without a launcher, each start is a launch
        return uuid.uuid4().hex
    if run_id != "none":
        return run_id
    import psutil  # deferred: most commands have no launcher

    return f"process {os.getppid()}, started at {psutil.Process(os.getppid()).create_time()}"


def check_launch() -> None:
    """Raise UserError if a restart of this launch would hang."""
    several_nodes = _read_env_int("LOCAL_WORLD_SIZE", 1) < get_world_size()
    may_restart = several_nodes and _read_env_int("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    require(
        not (_is_store_shared() and may_restart),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE: must be 1 if several nodes may restart, got "
        "nothing; export it for torchrun on every node, or launch with --max-restarts=0",
    )


def rendezvous_url() -> str | None:
    """Return the URL of the rendezvous, or None to leave it to PyTorch; raise UserError for processes of no launcher.

    torchrun keeps one store for all attempts, in which a later attempt would find the addresses of
    dead processes. So the handler, which is registered here, prefixes keys with the number of the
    attempt. Each node counts its own attempts, so this works on one node only.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    require(
        not missing,
        f"WORLD_SIZE: must come from a launcher, got {get_world_size()} without {', '.join(missing)}; unset it, or "
        "start the command by torchrun",
    )
    if not _is_store_shared():
        return None
    _register_rendezvous()
    return f"{SCHEME}://"


def _is_store_shared() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _read_env_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


@functools.cache
def _register_rendezvous() -> None:
    from torch.distributed.rendezvous import register_rendezvous_handler  # deferred: slow to import

    register_rendezvous_handler(SCHEME, _rendezvous_attempt)


def _rendezvous_attempt(_address: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    # A sweep connects for each of its jobs, in step on all processes; a store keeps the addresses of the one before.
    attempt = f"{_read_env_int('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_connections)}"
    for store, rank, processes in rendezvous("env://", **kwargs):
        yield PrefixStore(attempt, store), rank, processes
