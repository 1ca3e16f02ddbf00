"""What the launcher says of this process: how many there are, and how they meet after a restart."""

import functools
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from models.errors import UserError

SCHEME = "attempt"  # of the addresses by which processes meet


def launched() -> int:
    """Processes of this run, over all nodes."""
    return _number("WORLD_SIZE", 1)


def launcher() -> list[str]:
    """The words of a shell that launch as many processes; a user names where several nodes meet."""
    processes = launched()
    if processes == 1:
        return ["python"]
    here = _number("LOCAL_WORLD_SIZE", processes)
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=NODE0:29400"]
    nodes = [f"--nnodes={processes // here}", *meet] if here < processes else []
    return ["torchrun", *nodes, f"--nproc-per-node={here}"]


def restarted() -> bool:
    """Whether the launcher has started this run anew after a process of it died."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0) > 0


def check() -> None:
    """Refuse a launch whose restarts would hang."""
    several_nodes = _number("LOCAL_WORLD_SIZE", 1) < launched()
    if _shares_store() and several_nodes and _number("TORCHELASTIC_MAX_RESTARTS", 0):
        raise UserError(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE: must be 1 where several nodes may restart, got "
            "nothing; export it for torchrun on every node, or launch with --max-restarts=0"
        )


def meeting_place() -> str | None:
    """Where processes find each other; None leaves it to PyTorch.

    torchrun keeps one store for all attempts, in which those of a later attempt would find the
    addresses of the dead. Their number tells attempts apart, on one node: each counts its own.
    """
    if not _shares_store():
        return None
    _register()
    return f"{SCHEME}://"


def _shares_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise))


@functools.cache
def _register() -> None:
    register_rendezvous_handler(SCHEME, _meet)


def _meet(_address: str, **kwargs: Any) -> Iterator[tuple[PrefixStore, int, int]]:
    attempt = str(_number("TORCHELASTIC_RESTART_COUNT", 0))
    for store, rank, processes in rendezvous("env://", **kwargs):
        yield PrefixStore(attempt, store), rank, processes
