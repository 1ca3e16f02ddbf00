"""Detection of hardware: the choice of a device, its reason, and errors for a missing one."""

import functools
import logging
import os
import shutil
from dataclasses import dataclass

import torch

from models.device.host import Host
from models.device.neuron_packages import (
    check_native,
    check_package_mix,
    check_xla,
    installed_version,
)
from models.errors import UserError

log = logging.getLogger(__name__)
SUPPORTED_ACCELERATORS = ("cuda", "neuron")  # PyTorch's names; `auto` takes no untested ones


@dataclass(frozen=True, kw_only=True)
class RouteChoice:
    """A route (cpu, cuda, neuron or xla: how PyTorch reaches the device) and why it was chosen."""

    name: str
    reason: str


def choose_route(name: str, host: Host) -> RouteChoice:
    """Choose the route for a device name; raise UserError with the reason if it is unavailable.

    `auto` refuses broken Neuron packages too: a user who installed them does not expect the CPU.
    """
    if name == "cpu":
        return RouteChoice(name=name, reason="as configured")
    if name in ("auto", "neuron", "xla"):
        check_package_mix()
    choice = (
        _detect_route(host) if name == "auto" else RouteChoice(name=name, reason="as configured")
    )
    if choice.name == "neuron":
        _check_core_generation(host)
        check_native()
    elif choice.name == "xla":
        _check_neuron_device(host)
        check_xla(on_neuron=is_neuron_route(choice.name))
    _check_available(choice, host)
    return choice


def is_neuron_route(name: str) -> bool:
    """Return whether a route runs on Neuron cores: natively, or by XLA with Neuron's library."""
    return name == "neuron" or (name == "xla" and installed_version("libneuronxla") is not None)


def torch_device_of(name: str) -> torch.device:
    """Return the PyTorch device that a route computes on."""
    if name == "xla":
        import torch_xla  # pyright: ignore[reportMissingImports]

        # Otherwise a module moved to XLA gets new parameters, and tied weights are no longer tied.
        torch.__future__.set_swap_module_params_on_conversion(True)
        return torch_xla.device()
    return torch.device(name)


@functools.cache
def can_compile(name: str) -> bool:
    """Return whether Inductor has the C++ compiler that it needs on a CPU; warn once if not."""
    if name != "cpu" or any(shutil.which(tool) for tool in ("g++", "clang++", "c++")):
        return True
    log.warning("no C++ compiler found: compiled parts run eagerly (install g++ for full speed)")
    return False


def _detect_route(host: Host) -> RouteChoice:
    if pjrt := os.environ.get("PJRT_DEVICE"):
        return RouteChoice(name="xla", reason=f"PJRT_DEVICE={pjrt} is set")
    accelerator = _find_accelerator()
    if accelerator in SUPPORTED_ACCELERATORS:
        return RouteChoice(
            name=accelerator, reason=f"PyTorch sees {torch.accelerator.device_count()} of them"
        )
    if installed_version("libneuronxla"):
        return RouteChoice(name="xla", reason="libneuronxla is installed")
    if host.has_neuron:
        log.warning(
            "this machine has Neuron cores, but no package that drives them is installed: "
            "running on the CPU (see docs/trainium.md)"
        )
    if accelerator is None:
        return RouteChoice(name="cpu", reason="PyTorch sees no accelerator")
    log.warning(
        "device=auto takes CUDA, Neuron or the CPU, not %s: running on the CPU", accelerator
    )
    return RouteChoice(name="cpu", reason=f"{accelerator} is not supported")


def _find_accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _check_core_generation(host: Host) -> None:
    if host.instance_type and host.instance_type.startswith(("trn1", "inf2")):
        raise UserError(
            f"device.name: the native route needs Trainium 2 or 3, got neuron on "
            f"{host.instance_type}; use device=xla with torch 2.9"
        )


def _check_neuron_device(host: Host) -> None:
    if installed_version("libneuronxla") and not host.has_neuron:
        raise UserError(
            "device.name: libneuronxla needs a Neuron device, got none at /dev/neuron*; use a "
            "Trainium instance (in a container: --device=/dev/neuron0), or pip uninstall "
            "libneuronxla for XLA's own CPU device"
        )


def _check_available(choice: RouteChoice, host: Host) -> None:
    accelerator = _find_accelerator()
    if choice.name in ("cpu", "xla", accelerator):
        return
    devices = "cpu" if accelerator is None else f"cpu and {accelerator}"
    remedy = "use device=auto"
    if choice.name == "neuron" and not host.has_neuron:
        remedy = "there is no /dev/neuron*: use a Trainium 2 or 3 instance, or device=auto"
    raise UserError(f"device.name: PyTorch sees {devices} here, got {choice.name}; {remedy}")
