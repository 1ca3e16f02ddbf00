"""Which hardware is here, and whether what is asked of it can be had."""

import functools
import logging
import os
import shutil

import torch

from models.errors import UserError

log = logging.getLogger(__name__)


def detect() -> str:
    if os.environ.get("PJRT_DEVICE"):
        return "xla"
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else "cpu"


def place_of(name: str) -> torch.device:
    if name == "xla":
        try:
            import torch_xla  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError(
                "device.name: torch_xla is not installed, got xla; install the `xla` extra"
            ) from None
        return torch_xla.device()
    if name != "cpu":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != name:
            there = "cpu" if found is None else f"cpu and {found.type}"
            raise UserError(f"device.name: PyTorch sees {there} here, got {name}; use device=auto")
    return torch.device(name)


@functools.cache
def can_compile(name: str) -> bool:
    """Inductor needs a C++ compiler on a CPU; without one everything runs eagerly, said once."""
    if name != "cpu" or any(shutil.which(tool) for tool in ("g++", "clang++", "c++")):
        return True
    log.warning("no C++ compiler found: compiled parts run eagerly (install g++ for full speed)")
    return False
