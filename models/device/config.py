"""What a run says of its device, and the device that comes of it."""

import logging
from dataclasses import dataclass
from enum import Enum

import torch

from models.device.detect import can_compile, choose, drives_neuron, place_of
from models.device.hardware import Device
from models.device.host import Machine
from models.device.neuron_env import Settings
from models.device.neuron_packages import PACKAGES, installed
from models.errors import UserError

log = logging.getLogger(__name__)


class DeviceName(Enum):
    """`auto` takes the accelerator that PyTorch sees, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    neuron = "neuron"
    xla = "xla"


class Precision(Enum):
    """Of the target and the runtime, or of Muon's products. The draft has fp32 masters anyway."""

    auto = "auto"  # float32 on a CPU, bfloat16 elsewhere
    float32 = "float32"
    bfloat16 = "bfloat16"


def matmul_dtype(precision: Precision, place: torch.device) -> torch.dtype:
    """Return the type that large products are computed in.

    CPUs without matrix units for bf16 compute them several times slower than in fp32.
    """
    if precision is Precision.auto:
        precision = Precision.float32 if place.type == "cpu" else Precision.bfloat16
    return getattr(torch, precision.value)


@dataclass(kw_only=True)
class DeviceConf(Settings):
    """Which device, how precise, whether to compile, and what compiler and runtime are told."""

    name: DeviceName = DeviceName.auto
    precision: Precision = Precision.auto
    compile: bool = True
    threads: int | None = None  # of the CPU; None: as PyTorch chooses, one to judge a tiny target

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads < 1:
            raise UserError(
                f"device.threads: must be at least 1, got {self.threads}; null leaves the choice"
            )
        if self.stochastic_rounding and self.precision is Precision.float32:
            raise UserError(
                "device.stochastic_rounding: rounds to bfloat16, got device.precision=float32; "
                "leave one of them out"
            )

    def build(self) -> Device:
        """Choose, say why, and set the environment. Raises UserError where that cannot be had."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        machine = Machine()
        choice = choose(self.name.value, machine)
        route = choice.name
        environment = self.apply(route, drives_neuron=drives_neuron(route), machine=machine)
        log.info("device: %s, %s (%s)", route, choice.reason, _found(machine))
        place = place_of(route)
        return Device(
            name=route,
            torch_device=place,
            dtype=matmul_dtype(self.precision, place),
            compiles=route == "xla" or (self.compile and can_compile(route)),
            backend="neuron" if route == "neuron" else "inductor",
            threads=self.threads,
            instance=machine.instance,
            environment=environment,
        )


def _found(machine: Machine) -> str:
    """Packages and hardware that the choice was made from, in words."""
    packages = [f"{name} {found}" for name in PACKAGES if (found := installed(name))]
    hardware = [machine.instance or "", "/dev/neuron*" if machine.has_neuron else ""]
    return ", ".join([*packages, *filter(None, hardware)])
