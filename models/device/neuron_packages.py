"""Neuron's packages: which are installed, and whether their versions fit together.

Two generations share names. The native one (`torch-neuronx` 2.13 and 2.14) fills PyTorch's open
device slot; the older one (2.9 and below) builds on `torch_xla`. Under some of the names PyPI has
placeholders, which can be imported but do nothing.
"""

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

from models.errors import UserError

PIP_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
PLACEHOLDERS = {"torch-neuronx": "1.0", "neuronx-distributed": "0.1", "vllm-neuron": "0.1"}
NATIVE_VERSIONS = ("2.13", "2.14")
XLA_VERSION = "2.9"
PACKAGES = (
    "torch",
    "torch-neuronx",
    "neuronx-cc",
    "torch_xla",
    "libneuronxla",
    "neuronx-distributed",
)
XLA_PACKAGES = ("torch_xla", "libneuronxla", "neuronx-distributed")


def installed_version(name: str) -> str | None:
    """Return the version of a package without its build tag; None if it is not installed."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def minor_version(name: str) -> str | None:
    """Return the first two numbers of a package's version; None if it is not installed."""
    version = installed_version(name)
    return version and ".".join(version.split(".")[:2])


def is_native() -> bool:
    """Return whether the installed `torch-neuronx` is of the generation without torch_xla."""
    version = minor_version("torch-neuronx")
    return version is not None and _version_numbers(version) > _version_numbers(XLA_VERSION)


def guard_torch_autoload() -> None:
    """Keep PyTorch, before it is imported, from loading a native package for another version.

    PyTorch would load it automatically and raise a traceback; `check_native` raises a UserError.
    """
    if is_native() and minor_version("torch-neuronx") != minor_version("torch"):
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def check_package_mix() -> None:
    """Raise UserError for placeholders, and for packages of both generations."""
    for name, placeholder in PLACEHOLDERS.items():
        if minor_version(name) == placeholder:
            raise UserError(
                f"device.name: {name} must come from Neuron's own index, got PyPI's placeholder "
                f"{installed_version(name)}; pip uninstall {name}, then pip install {name} "
                f"{PIP_INDEX}"
            )
    xla_packages = [name for name in XLA_PACKAGES if installed_version(name)]
    if is_native() and xla_packages:
        raise UserError(
            f"device.name: native torch-neuronx {installed_version('torch-neuronx')} must stand "
            f"alone, got {', '.join(xla_packages)} of the XLA generation beside it; "
            f"pip uninstall {' '.join(xla_packages)}"
        )


def check_native() -> None:
    """Raise UserError where the native packages are missing or do not match."""
    version, torch = minor_version("torch-neuronx"), installed_version("torch")
    if version is None:
        raise UserError(
            "device.name: neuron needs torch-neuronx, which is not installed, got neuron; "
            f"pip install 'torch-neuronx==2.14.*' 'neuronx-cc==2.*' {PIP_INDEX}, or device=auto"
        )
    if version not in NATIVE_VERSIONS:
        remedy = (
            f"pip install 'torch-neuronx==2.14.*' {PIP_INDEX}"
            if is_native()
            else "it is of the XLA generation: use device=xla"
        )
        raise UserError(
            f"device.name: neuron needs torch-neuronx {' or '.join(NATIVE_VERSIONS)}, "
            f"got {installed_version('torch-neuronx')}; {remedy}"
        )
    if minor_version("torch") != version:
        raise UserError(
            f"device.name: torch-neuronx {installed_version('torch-neuronx')} needs torch "
            f"{version}, got torch {torch}; pip install 'torch=={version}.*'"
        )
    _check_compiler()


def check_xla(*, on_neuron: bool) -> None:
    """Raise UserError where the packages of the XLA route are missing or do not match.

    With `on_neuron`, libneuronxla runs on Neuron cores; else the device is XLA's own CPU device.
    """
    torch, xla = installed_version("torch"), installed_version("torch_xla")
    if xla is None:
        raise UserError("device.name: torch_xla is not installed, got xla; install the `xla` extra")
    if not (minor_version("torch") == minor_version("torch_xla") == XLA_VERSION):
        raise UserError(
            f"device.name: xla needs torch and torch_xla {XLA_VERSION}, got torch {torch} and "
            f"torch_xla {xla}; pip install 'torch=={XLA_VERSION}.*' 'torch_xla=={XLA_VERSION}.*'"
        )
    if on_neuron:
        _check_compiler()


def _check_compiler() -> None:
    if installed_version("neuronx-cc") is None and shutil.which("neuronx-cc") is None:
        raise UserError(
            "device.name: Neuron's compiler neuronx-cc must be installed, got none; "
            f"pip install 'neuronx-cc==2.*' {PIP_INDEX}"
        )


def _version_numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]
