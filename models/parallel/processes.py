"""The processes of a command: their group, and what all of them take from the main one."""

import gc
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Imported later, its functions' defaults would hold the default group: destroyed, its threads would live on, and
# one that still frees a tensor when Python exits aborts the process.
import torch.distributed.nn

from models.device.xla.device import register_backend
from models.parallel import torchrun

DEVICE_BACKENDS = {"cuda": "nccl", "neuron": "neuron"}  # by the type of PyTorch's device
COLLECTIVE_TIMEOUT = timedelta(hours=6)  # ranks wait while rank 0 answers prompts or evaluates
T = TypeVar("T")


def choose_backend(device_type: str) -> str:
    """Return the backends of a process group: gloo for tensors of the host, the device's own for its tensors.

    PyTorch/XLA's is alone, because groups of it can be made in a default group of it only.

    >>> [choose_backend(device_type) for device_type in ("cpu", "cuda", "neuron", "xla")]
    ['gloo', 'cpu:gloo,cuda:nccl', 'cpu:gloo,neuron:neuron', 'xla']
    """
    if device_type in ("cpu", "xla"):
        return "gloo" if device_type == "cpu" else "xla"
    return f"cpu:gloo,{device_type}:{DEVICE_BACKENDS[device_type]}"


def connect_processes(device_type: str) -> None:
    """Initialize the default process group of the launched processes."""
    if torchrun.get_world_size() == 1 or dist.is_initialized():
        return
    if device_type == "cuda":
        torch.cuda.set_device(torchrun.get_local_rank())
    if device_type == "xla":
        register_backend()
    backend, url = choose_backend(device_type), torchrun.rendezvous_url()
    dist.init_process_group(backend, init_method=url, timeout=COLLECTIVE_TIMEOUT)


def connect_hosts() -> dist.ProcessGroup | None:
    """Return a group of gloo beside a default one that cannot gather objects; None for a single process; collective."""
    group: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if dist.is_initialized() else None
    return group


def leave_processes() -> None:
    """Wait for the other processes, and destroy the group: a thread of gloo that is left at the exit aborts it."""
    if dist.is_initialized():
        dist.barrier()
        gc.collect()  # what holds the group goes first
        dist.destroy_process_group()


def share_from_main(value: T) -> T:
    """Return the main process's value, any that can be pickled; collective.

    Clocks differ, and processes that act on different times wait for each other forever.
    """
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]
