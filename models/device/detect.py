"""Which hardware is here, why it is taken, and why what was asked for cannot be had."""

import functools
import logging
import os
import shutil
from dataclasses import dataclass

import torch

from models.device.host import Machine
from models.device.neuron_packages import check_native, check_xla, installed, refuse_mixtures
from models.errors import UserError

log = logging.getLogger(__name__)
ACCELERATORS = ("cuda", "neuron")  # that PyTorch names and `auto` takes; no other one is tested


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A route, and the reason in words."""

    name: str
    reason: str


def choose(name: str, machine: Machine) -> Choice:
    """The route for what was asked. Raises UserError where it cannot be had, and says why.

    `auto` refuses broken Neuron packages too: who installed them did not mean the CPU.
    """
    if name == "cpu":
        return Choice(name=name, reason="as asked")
    if name in ("auto", "neuron", "xla"):
        refuse_mixtures()
    choice = _automatic(machine) if name == "auto" else Choice(name=name, reason="as asked")
    if choice.name == "neuron":
        _refuse_older_cores(machine)
        check_native()
    elif choice.name == "xla":
        _refuse_a_missing_device(machine)
        check_xla(on_neuron=drives_neuron(choice.name))
    _refuse_what_is_not_there(choice, machine)
    return choice


def drives_neuron(name: str) -> bool:
    """Whether a route ends on Neuron cores: the native one, or XLA with Neuron's library."""
    return name == "neuron" or (name == "xla" and installed("libneuronxla") is not None)


def place_of(name: str) -> torch.device:
    """The device as PyTorch names it."""
    if name == "xla":
        import torch_xla  # pyright: ignore[reportMissingImports]

        # else a module that moves there gets new parameters, and tied ones are tied no more
        torch.__future__.set_swap_module_params_on_conversion(True)
        return torch_xla.device()
    return torch.device(name)


@functools.cache
def can_compile(name: str) -> bool:
    """Inductor needs a C++ compiler on a CPU; without one everything runs eagerly, said once."""
    if name != "cpu" or any(shutil.which(tool) for tool in ("g++", "clang++", "c++")):
        return True
    log.warning("no C++ compiler found: compiled parts run eagerly (install g++ for full speed)")
    return False


def _automatic(machine: Machine) -> Choice:
    if pjrt := os.environ.get("PJRT_DEVICE"):
        return Choice(name="xla", reason=f"PJRT_DEVICE={pjrt} is set")
    seen = _seen()
    if seen in ACCELERATORS:
        return Choice(name=seen, reason=f"PyTorch sees {torch.accelerator.device_count()} of them")
    if installed("libneuronxla"):
        return Choice(name="xla", reason="libneuronxla is installed")
    if machine.has_neuron:
        log.warning(
            "this machine has Neuron cores, but no package that drives them is installed: "
            "running on the CPU (see docs/trainium.md)"
        )
    if seen is None:
        return Choice(name="cpu", reason="PyTorch sees no accelerator")
    log.warning("device=auto takes CUDA, Neuron or the CPU, not %s: running on the CPU", seen)
    return Choice(name="cpu", reason=f"{seen} is not supported")


def _seen() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def _refuse_older_cores(machine: Machine) -> None:
    if machine.instance and machine.instance.startswith(("trn1", "inf2")):
        raise UserError(
            f"device.name: the native route needs Trainium 2 or 3, got neuron on "
            f"{machine.instance}; use device=xla with torch 2.9"
        )


def _refuse_a_missing_device(machine: Machine) -> None:
    if installed("libneuronxla") and not machine.has_neuron:
        raise UserError(
            "device.name: libneuronxla needs a Neuron device, got none at /dev/neuron*; use a "
            "Trainium instance (in a container: --device=/dev/neuron0), or pip uninstall "
            "libneuronxla for XLA's own CPU device"
        )


def _refuse_what_is_not_there(choice: Choice, machine: Machine) -> None:
    seen = _seen()
    if choice.name in ("cpu", "xla", seen):
        return
    there = "cpu" if seen is None else f"cpu and {seen}"
    why = "use device=auto"
    if choice.name == "neuron" and not machine.has_neuron:
        why = "there is no /dev/neuron*: use a Trainium 2 or 3 instance, or device=auto"
    raise UserError(f"device.name: PyTorch sees {there} here, got {choice.name}; {why}")
