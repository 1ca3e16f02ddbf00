"""What a run says of its device: which, how precise, whether to compile."""

from dataclasses import dataclass
from enum import Enum

import torch

from models.device.detect import can_compile, detect, place_of
from models.device.hardware import Device
from models.errors import UserError


class DeviceName(Enum):
    """`auto` takes the accelerator that PyTorch sees, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    neuron = "neuron"
    xla = "xla"


class Precision(Enum):
    """Of the target and the runtime. The draft trains in fp32 masters whatever this is."""

    auto = "auto"  # float32 on a CPU, bfloat16 elsewhere
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True)
class DeviceConf:
    """Which device, how precise, and whether to compile."""

    name: DeviceName = DeviceName.auto
    precision: Precision = Precision.auto
    compile: bool = True
    threads: int | None = None  # of the CPU; None: as PyTorch chooses, one to judge a tiny target

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UserError(
                f"device.threads: must be at least 1, got {self.threads}; null leaves the choice"
            )

    def build(self) -> Device:
        """Raises UserError where the named device is not there."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        name = detect() if self.name is DeviceName.auto else self.name.value
        place = place_of(name)
        precise = self.precision is Precision.float32 or (
            self.precision is Precision.auto and place.type == "cpu"
        )
        return Device(
            name=name,
            torch_device=place,
            dtype=torch.float32 if precise else torch.bfloat16,
            compiles=self.compile and can_compile(name),
            backend={"neuron": "neuron", "xla": "openxla"}.get(name, "inductor"),
            threads=self.threads,
        )
