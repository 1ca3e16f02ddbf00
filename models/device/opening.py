"""Open the device of a configuration: choose its route (how PyTorch reaches it), or say why not."""

import functools
import logging
import os
import shutil
import warnings
from typing import NamedTuple

import torch

from models.device.config import DeviceConf, Precision
from models.device.cpu import CpuDevice, keep_freed_memory
from models.device.device import Device
from models.device.host import Host
from models.device.packages import PACKAGES, check_native, check_package_mix, installed_version
from models.device.xla.device import XlaDevice, open_xla_device
from models.device.xla.requirements import check_xla
from models.io.errors import require

log = logging.getLogger(__name__)
SUPPORTED_ACCELERATORS = ("cuda", "neuron")  # PyTorch's names; `auto` takes no untested ones


def matmul_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the number type in which large matrix products are computed.

    CPUs without matrix units for bf16 compute them several times slower than in fp32.
    """
    if precision is Precision.auto:
        precision = Precision.float32 if device.type == "cpu" else Precision.bfloat16
    return getattr(torch, precision.value)


def open_device(conf: DeviceConf) -> Device:
    """Choose a device, log why, set its environment variables and threads, and return it.

    Raise UserError if it is unavailable.
    """
    if conf.threads is not None:
        torch.set_num_threads(conf.threads)
    host = Host()
    route, reason = choose_route(conf.name.value, host)
    # Before the device is opened, because compiler and runtime read the variables then.
    environment = conf.set_environment(route, on_neuron=is_neuron_route(route), host=host)
    log.info("device: %s, %s (%s)", route, reason, _describe_host(host))
    require(
        route == "cuda" or not conf.cuda_graphs, f"device.cuda_graphs: needs device=cuda, got {route}; leave it out"
    )
    device_class, torch_device = open_route(route)
    if torch_device.type == "cpu":
        keep_freed_memory()
    # Products in fp32 are exact here; Inductor advises otherwise on CUDA.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    return device_class(
        name=route,
        torch_device=torch_device,
        dtype=matmul_dtype(conf.precision, torch_device),
        # PyTorch/XLA computes everything as compiled graphs, whatever `compile` says.
        compiles=route == "xla" or (conf.compile and can_compile(route)),
        records_rounds=conf.cuda_graphs,
        backend="neuron" if route == "neuron" else "inductor",
        threads=conf.threads,
        instance_type=host.instance_type,
        environment=environment,
    )


def _describe_host(host: Host) -> str:
    """Return the packages and the hardware that the choice depends on, as text."""
    packages = [f"{name} {version}" for name in PACKAGES if (version := installed_version(name))]
    hardware = [host.instance_type or "", "/dev/neuron*" if host.has_neuron else ""]
    return ", ".join([*packages, *filter(None, hardware)])


class RouteChoice(NamedTuple):
    """A route (cpu, cuda, neuron or xla) and why it was chosen."""

    name: str
    reason: str


def choose_route(name: str, host: Host) -> RouteChoice:
    """Return the route for a device name; raise UserError with the reason if it is unavailable.

    Broken Neuron packages are an error for `auto` too, because a user who installed them does not expect the CPU.
    """
    if name in ("auto", "neuron", "xla"):
        check_package_mix()
    choice = _detect_route(host) if name == "auto" else RouteChoice(name, "as configured")
    if choice.name == "neuron":
        require(
            not (host.instance_type or "").startswith(("trn1", "inf2")),
            f"device.name: the native route needs Trainium 2 or 3, got neuron on "
            f"{host.instance_type}; use device=xla with torch 2.9",
        )
        check_native()
    elif choice.name == "xla":
        check_xla(host, on_neuron=is_neuron_route(choice.name))
    _check_available(choice.name, host)
    return choice


def is_neuron_route(name: str) -> bool:
    """Return whether a route runs on Neuron cores: natively, or by XLA with Neuron's library."""
    return name == "neuron" or (name == "xla" and installed_version("libneuronxla") is not None)


def open_route(route: str) -> tuple[type[Device], torch.device]:
    """Return the class of a route's device, and the PyTorch device that it computes on."""
    if route == "xla":
        return XlaDevice, open_xla_device()
    return CpuDevice if route == "cpu" else Device, torch.device(route)


@functools.cache
def can_compile(name: str) -> bool:
    """Return whether functions can be compiled: on a CPU, Inductor needs a C++ compiler.

    Log a warning, once, if it is missing.
    """
    if name != "cpu" or any(shutil.which(tool) for tool in ("g++", "clang++", "c++")):
        return True
    log.warning("no C++ compiler found: compiled parts run eagerly (install g++ for full speed)")
    return False


def _detect_route(host: Host) -> RouteChoice:
    if pjrt := os.environ.get("PJRT_DEVICE"):
        return RouteChoice("xla", f"PJRT_DEVICE={pjrt} is set")
    accelerator = _find_accelerator()
    if accelerator in SUPPORTED_ACCELERATORS:
        return RouteChoice(accelerator, f"PyTorch sees {torch.accelerator.device_count()} of them")
    if installed_version("libneuronxla"):
        return RouteChoice("xla", "libneuronxla is installed")
    if host.has_neuron:
        log.warning(
            "this machine has Neuron cores, but no package that drives them is installed: "
            "running on the CPU (see docs/trainium.md)"
        )
    if accelerator is None:
        return RouteChoice("cpu", "PyTorch sees no accelerator")
    log.warning("device=auto takes CUDA, Neuron or the CPU, not %s: running on the CPU", accelerator)
    return RouteChoice("cpu", f"{accelerator} is not supported")


def _find_accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _check_available(route: str, host: Host) -> None:
    accelerator = _find_accelerator()
    devices = "cpu" if accelerator is None else f"cpu and {accelerator}"
    remedy = (
        "there is no /dev/neuron*: use a Trainium 2 or 3 instance, or device=auto"
        if route == "neuron" and not host.has_neuron
        else "use device=auto"
    )
    # TorchNeuron compiles for a device that is not here; device.memory_gib stands in for its memory.
    compiles_only = route == "neuron" and os.environ.get("TORCH_NEURONX_COMPILE_ONLY") == "1"
    require(
        compiles_only or route in ("cpu", "xla", accelerator),
        f"device.name: PyTorch sees {devices} here, got {route}; {remedy}",
    )
