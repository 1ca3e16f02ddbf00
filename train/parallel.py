"""How a run is spread over processes. Accelerate launches, places, shards and casts."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from models.device import Device


def accelerator_for(device: Device, *, trackers: list[str]) -> Accelerator:
    """Mixed precision follows the device; masters stay fp32 either way."""
    # A sweep runs several configs in one process, and Accelerate would refuse a second precision.
    AcceleratorState._reset_state()
    return Accelerator(
        mixed_precision="bf16" if device.dtype is torch.bfloat16 else "no",
        cpu=device.torch_device.type == "cpu",
        log_with=[*trackers] or None,
        step_scheduler_with_optimizer=False,  # else schedules run ahead by the number of processes
    )
