"""The `device` group of the configuration, and the device that is built from it."""

import logging
from dataclasses import dataclass
from enum import Enum

import torch

from models.device.device import Device
from models.device.host import Host
from models.device.neuron_env import NeuronEnv
from models.device.neuron_packages import PACKAGES, installed_version
from models.device.route_choice import can_compile, choose_route, is_neuron_route, open_device
from models.errors import require
from models.validation import at_least, check_values

log = logging.getLogger(__name__)


class DeviceName(Enum):
    """The devices by name; `auto` takes the accelerator that PyTorch sees, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    neuron = "neuron"
    xla = "xla"


class Precision(Enum):
    """Number types of target and runtime, or of Muon's products; drafts have fp32 masters."""

    auto = "auto"  # bfloat16; on a CPU by models/target/precision.py, else float32
    float32 = "float32"
    bfloat16 = "bfloat16"


def matmul_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the number type in which large matrix products are computed.

    CPUs without matrix units for bf16 compute them several times slower than in fp32.
    """
    if precision is Precision.auto:
        precision = Precision.float32 if device.type == "cpu" else Precision.bfloat16
    return getattr(torch, precision.value)


@dataclass(kw_only=True)
class DeviceConf(NeuronEnv):
    """Device, precision, compilation, and the environment of Neuron's compiler and runtime."""

    name: DeviceName = DeviceName.auto
    precision: Precision = Precision.auto
    compile: bool = True
    threads: int | None = None  # of the CPU; None: PyTorch's choice, or one for a tiny target

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "device", threads=at_least(1, "null leaves it to PyTorch"))
        require(
            not self.stochastic_rounding or self.precision is not Precision.float32,
            "device.stochastic_rounding: rounds to bfloat16, got device.precision=float32; "
            "leave one of them out",
        )

    def build(self) -> Device:
        """Choose a device, log why, set its environment variables and threads, and return it.

        Raise UserError if it is unavailable.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        host = Host()
        route, reason = choose_route(self.name.value, host)
        # Before the device is opened, because compiler and runtime read the variables then.
        environment = self.set_environment(route, on_neuron=is_neuron_route(route), host=host)
        log.info("device: %s, %s (%s)", route, reason, _describe_host(host))
        device_class, torch_device = open_device(route)
        return device_class(
            name=route,
            torch_device=torch_device,
            dtype=matmul_dtype(self.precision, torch_device),
            # PyTorch/XLA computes everything as compiled graphs, whatever `compile` says.
            compiles=route == "xla" or (self.compile and can_compile(route)),
            backend="neuron" if route == "neuron" else "inductor",
            threads=self.threads,
            instance_type=host.instance_type,
            environment=environment,
        )


def _describe_host(host: Host) -> str:
    """Return the packages and the hardware that the choice depends on, as text."""
    packages = [f"{name} {version}" for name in PACKAGES if (version := installed_version(name))]
    hardware = [host.instance_type or "", "/dev/neuron*" if host.has_neuron else ""]
    return ", ".join([*packages, *filter(None, hardware)])
