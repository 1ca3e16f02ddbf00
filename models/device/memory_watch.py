"""The most memory that a process takes, to stand beside what was planned, and memory that is not there."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from models.device.device import Device
from models.io.errors import UserError

MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
ACCELERATORS = ("cuda", "neuron")  # whose allocators count
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")  # 5 resets the peak of resident memory
# What PyTorch's allocators say in a RuntimeError, which only that of CUDA has a class for.
ALLOCATION_FAILURES = ("can't allocate memory", "out of memory")


class MemoryWatch:
    """The peak of a process's memory since the watch began: that of its accelerator, or resident memory."""

    def __init__(self, device: Device):
        self.device, self.bytes_before = device, 0
        if device.name in ACCELERATORS:
            # Neuron's module has the peak alone (torch-neuronx 2.14), which then counts from the start of the process.
            getattr(torch.get_device_module(device.name), "reset_peak_memory_stats", lambda: None)()
        elif device.name == "cpu":
            if os.access(CLEAR_REFS, os.W_OK):  # on Linux alone
                CLEAR_REFS.write_text("5")
            self.bytes_before = psutil.Process(os.getpid()).memory_info().rss

    @property
    def quantity(self) -> str:
        """Return what `peak_bytes` counts; a CPU does not tell tensors from the rest."""
        if self.device.name == "cpu":
            return "more in the whole process, compiler and mapped files included"
        return "of tensors seen"

    def peak_bytes(self) -> int | None:
        """Return the peak above what was taken before; None if the device does not tell."""
        if self.device.name in ACCELERATORS:
            return torch.get_device_module(self.device.name).max_memory_allocated()
        if self.device.name == "cpu":
            return max(0, read_host_peak() - self.bytes_before)
        return None


def read_host_peak() -> int:
    """Return the peak of resident memory in bytes; by VmHWM on Linux, where a child inherits its parent's ru_maxrss."""
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        if peak := lines.get("VmHWM"):  # which sandboxes such as gVisor leave out
            return 1024 * int(peak.split()[0])
    return MAXRSS_UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def report_out_of_memory(message: str) -> Iterator[None]:
    """Raise UserError with `message` if an allocation in the block fails."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(message) from error
    except RuntimeError as error:
        if not any(failure in str(error).lower() for failure in ALLOCATION_FAILURES):
            raise
        raise UserError(message) from error
