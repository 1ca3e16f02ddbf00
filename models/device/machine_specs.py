"""What a machine offers a run: from conf/machine/<name>.yaml, or of this one by short measurements.

A core is what one process has: a logical NeuronCore, a GPU, or all of a CPU. Published figures are
per chip and are shared evenly by its cores.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch

from models.device import Device, DeviceConf, Precision
from models.errors import UserError

HERE = "here"
MEASURED_S = 0.5  # of each measurement
SIDE = 2048  # of the matrices that are multiplied
MOVED = 1 << 28  # bytes that are copied: more than caches hold


@dataclass(kw_only=True)
class MachineConf:
    """A machine by its published figures; `here` has none, and is measured."""

    name: str = HERE
    chips: int = 1
    cores: int = 1  # of a chip, as processes see them
    memory_gib: float = 0.0  # of a chip, as all that follows
    bandwidth_gb_s: float = 0.0
    tflops: dict[str, float] = field(default_factory=dict)  # by type of number
    link_gb_s: float = 0.0  # to other chips
    vcpus: int = 0
    host_memory_gib: float = 0.0
    length_multiple: int = 1  # of a row, for the route that the machine takes
    repeats_heads: bool = False  # whether more cores than key-value heads may share a target

    def __post_init__(self) -> None:
        for key in ("chips", "cores"):
            if getattr(self, key) < 1:
                raise UserError(f"machine.{key}: must be at least 1, got {getattr(self, key)}")

    @property
    def all_cores(self) -> int:
        return self.chips * self.cores

    @property
    def core_bytes(self) -> float:
        """Memory of a core."""
        return self.memory_gib * 2**30 / self.cores

    @property
    def core_bytes_s(self) -> float:
        """Memory that a core reads or writes in a second."""
        return self.bandwidth_gb_s * 1e9 / self.cores

    @property
    def core_link_bytes_s(self) -> float:
        """That a core sends to other chips in a second; there may be none."""
        return self.link_gb_s * 1e9 / self.cores or math.inf

    def core_flops(self, dtype: torch.dtype) -> float:
        """Operations of a core in a second. Types that are not listed are computed in fp32."""
        name = str(dtype).removeprefix("torch.")
        return self.tflops.get(name, self.tflops["float32"]) * 1e12 / self.cores

    def check(self, dtype: torch.dtype) -> None:
        """Raises UserError for a precision that the machine lacks."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.tflops:
            raise UserError(
                f"device.precision: must be one of {', '.join(self.tflops)} on {self.name}, "
                f"got {name}; choose one of them"
            )

    def check_length(self, length: int) -> None:
        """Raises UserError for rows that the machine's route would have to fill up."""
        if length % self.length_multiple:
            raise UserError(
                f"data.length: must be a multiple of {self.length_multiple} on {self.name}, got "
                f"{length}; take {-(-length // self.length_multiple) * self.length_multiple}"
            )

    def dtype(self, device: DeviceConf) -> torch.dtype:
        """What the target is computed in: what `device` builds here, or would build there."""
        if self.name == HERE:
            return device.build().dtype
        return torch.float32 if device.precision is Precision.float32 else torch.bfloat16

    def known(self, device: DeviceConf) -> "MachineConf":
        """Itself; `here` with what was measured on the device."""
        return measured(device.build()) if self.name == HERE else self


def measured(device: Device) -> MachineConf:
    """This machine, in about two seconds."""
    memory = psutil.virtual_memory()
    place, size, chips = device.torch_device, float(memory.total), 1
    if place.type != "cpu":
        size = float(torch.get_device_module(place.type).mem_get_info()[1])
        chips = torch.accelerator.device_count()
    return MachineConf(
        name=HERE,
        chips=chips,
        memory_gib=round(size / 2**30, 1),
        bandwidth_gb_s=_rounded(_bandwidth(device) / 1e9),
        tflops={
            str(dtype).removeprefix("torch."): _rounded(_products(device, dtype) / 1e12)
            for dtype in {torch.float32, device.dtype}
        },
        vcpus=os.cpu_count() or 1,
        host_memory_gib=round(memory.total / 2**30, 1),
    )


def _rounded(figure: float) -> float:
    """Keep three digits: a slow machine's figure must not become 0, which is divided by.

    >>> _rounded(0.031415), _rounded(212.34)
    (0.0314, 212.0)
    """
    return float(f"{figure:.3g}")


def _bandwidth(device: Device) -> float:
    """Bytes a second: a copy reads each byte and writes it."""
    source = torch.ones(MOVED // 8, device=device.torch_device)
    goal = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: goal.copy_(source), device)


def _products(device: Device, dtype: torch.dtype) -> float:
    """Operations a second of a matrix product."""
    left = torch.ones(SIDE, SIDE, dtype=dtype, device=device.torch_device)
    return 2 * SIDE**3 / _fastest(lambda: left @ left, device)


def _fastest(work: Callable[[], object], device: Device) -> float:
    """Seconds of the quickest try: others waited for something else."""
    best, until = math.inf, time.perf_counter() + MEASURED_S
    work()
    while time.perf_counter() < until:
        device.synchronize()
        began = time.perf_counter()
        work()
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
