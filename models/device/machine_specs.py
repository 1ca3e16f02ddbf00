"""Memory and speed of a machine: from conf/machine/<name>.yaml, or measured briefly on this one.

A core is what one process uses: a logical NeuronCore, a GPU, or all of a CPU. Published figures are
per chip and are divided evenly among its cores.
"""

import math
import os
import time
from collections.abc import Callable

import psutil
import torch

from models.device.config import LOCAL_MACHINE, DeviceConf, DeviceName, MachineConf
from models.device.device import Device
from models.device.host import Host
from models.io.errors import require

MEASURE_SECONDS = 0.5  # of each measurement
SMALLEST_MATRIX, LARGEST_MATRIX = 256, 2048  # rows and columns of the matrices that are multiplied
COPY_BYTES = 1 << 28  # more than any cache holds


def core_flops(machine: MachineConf, dtype: torch.dtype) -> float:
    """Return the operations of a core per second; types that are not listed count as fp32."""
    name = str(dtype).removeprefix("torch.")
    return machine.tflops[name if name in machine.tflops else "float32"] * 1e12 / machine.cores


def check_route(machine: MachineConf, conf: DeviceConf) -> None:
    """Raise UserError for a route that does not reach the machine."""
    require(
        conf.name is DeviceName.xla or not machine.needs_xla,
        f"device: must be xla with machine={machine.name}, where nothing newer runs, got {conf.name.name}; "
        "add device=xla",
    )


def check_dtype(machine: MachineConf, dtype: torch.dtype) -> None:
    """Raise UserError for a precision that the machine lacks."""
    name = str(dtype).removeprefix("torch.")
    require(
        name in machine.tflops,
        f"device.precision: must be one of {', '.join(machine.tflops)} on {machine.name}, "
        f"got {name}; choose one of them",
    )


def read_process_bytes(device: Device) -> float | None:
    """Return the memory that a process of this device has, or None if the device does not tell.

    The processes of a CPU share its memory. Of a GPU they have what other programs have left.
    """
    if device.name == "cpu":
        return read_host_bytes(Host()) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.name == "cuda":
        return float(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
    if device.name == "neuron":
        return read_total_bytes(device.torch_device)
    return None


def read_total_bytes(torch_device: torch.device) -> float:
    """Return the memory of an accelerator, of which a process has one."""
    return float(torch.get_device_module(torch_device.type).get_device_properties(torch_device).total_memory)


def read_host_bytes(host: Host) -> float:
    """Return the memory of the machine, or of the container that limits this process."""
    return float(min([psutil.virtual_memory().total, *host.list_memory_limits()]))


def measure_machine(device: Device) -> MachineConf:
    """Measure this machine in about two seconds, and return its figures."""
    require(
        device.name != "xla",
        "machine: must be named with device=xla, whose memory nobody can read, got here; choose the instance's",
    )
    torch_device, size, chips = device.torch_device, read_host_bytes(Host()), 1
    if torch_device.type != "cpu":
        size = read_total_bytes(torch_device)
        chips = torch.accelerator.device_count()
    # Source and destination, of 4 bytes per element, have COPY_BYTES together.
    source = torch.ones(COPY_BYTES // 8, device=torch_device)
    destination = torch.empty_like(source)
    copy_seconds = _time_fastest(lambda: destination.copy_(source), device, MEASURE_SECONDS)
    return MachineConf(
        name=LOCAL_MACHINE,
        chips=chips,
        memory_gib=round(size / 2**30, 1),
        # A copy reads each byte and writes it.
        bandwidth_gb_s=_round_figure(2 * source.nbytes / copy_seconds / 1e9),
        is_accelerator=torch_device.type != "cpu",
        scores_in_memory=device.scores_in_memory,
        length_multiple=device.length_multiple,
        tflops={
            str(dtype).removeprefix("torch."): _round_figure(_measure_flops(device, dtype) / 1e12)
            for dtype in {torch.float32, device.dtype}
        },
    )


def _round_figure(figure: float) -> float:
    """Return a figure with three significant digits, so that a small one, a divisor, is not 0.

    >>> _round_figure(0.031415), _round_figure(212.34)
    (0.0314, 212.0)
    """
    return float(f"{figure:.3g}")


def _measure_flops(device: Device, dtype: torch.dtype) -> float:
    """Return the measured operations per second of a matrix product, the largest that is over in time.

    Without instructions for bf16 a CPU needs 20 seconds for one of the last size, and an eighth for the size before.
    """
    size = SMALLEST_MATRIX
    while size < LARGEST_MATRIX and 8 * _time_product(size, device, dtype, 0.0) < MEASURE_SECONDS:
        size *= 2
    return 2 * size**3 / _time_product(size, device, dtype, MEASURE_SECONDS)


def _time_product(size: int, device: Device, dtype: torch.dtype, seconds: float) -> float:
    """Return the seconds of the fastest product of two square matrices that fits the given time."""
    matrix = torch.ones(size, size, dtype=dtype, device=device.torch_device)
    return _time_fastest(lambda: torch.matmul(matrix, matrix), device, seconds)


def _time_fastest(work: Callable[[], object], device: Device, seconds: float) -> float:
    """Return the seconds of the fastest of all calls that fit the given time: slower ones waited for something else."""
    work()  # allocates and initializes, so it is not timed
    best, until = math.inf, time.perf_counter() + seconds
    # A busy machine may need longer for a single call; that is measured too.
    while math.isinf(best) or time.perf_counter() < until:
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
