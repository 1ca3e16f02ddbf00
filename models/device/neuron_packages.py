"""Neuron's packages: which are installed, and whether they belong together.

Two generations share names. The native one (`torch-neuronx` 2.13 and 2.14) fills PyTorch's open
device slot; the older one (2.9 and below) stands on `torch_xla`. Of some names PyPI holds
placeholders, which import and do nothing.
"""

import os
import shutil
from importlib.metadata import PackageNotFoundError, version

from models.errors import UserError

INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
PLACEHOLDERS = {"torch-neuronx": "1.0", "neuronx-distributed": "0.1", "vllm-neuron": "0.1"}
NATIVE = ("2.13", "2.14")
XLA = "2.9"
PACKAGES = (
    "torch",
    "torch-neuronx",
    "neuronx-cc",
    "torch_xla",
    "libneuronxla",
    "neuronx-distributed",
)
XLA_ONLY = ("torch_xla", "libneuronxla", "neuronx-distributed")


def installed(name: str) -> str | None:
    """Version of a package, without what marks its build."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def minor(name: str) -> str | None:
    """The first two numbers of a package's version."""
    found = installed(name)
    return found and ".".join(found.split(".")[:2])


def native() -> bool:
    """Whether the installed `torch-neuronx` is of the generation that needs no torch_xla."""
    found = minor("torch-neuronx")
    return found is not None and _numbers(found) > _numbers(XLA)


def let_torch_load() -> None:
    """Keep PyTorch from loading a native package that is not of its version, before it is imported.

    It would do so by itself and end in a traceback; `check_native` says the same in a line.
    """
    if native() and minor("torch-neuronx") != minor("torch"):
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def refuse_mixtures() -> None:
    """Raises UserError for what no route can run with: placeholders, and both generations."""
    for name, placeholder in PLACEHOLDERS.items():
        if minor(name) == placeholder:
            raise UserError(
                f"device.name: {name} must come from Neuron's own index, got PyPI's placeholder "
                f"{installed(name)}; pip uninstall {name}, then pip install {name} {INDEX}"
            )
    beside = [name for name in XLA_ONLY if installed(name)]
    if native() and beside:
        raise UserError(
            f"device.name: native torch-neuronx {installed('torch-neuronx')} must stand alone, got "
            f"{', '.join(beside)} of the XLA generation beside it; pip uninstall {' '.join(beside)}"
        )


def check_native() -> None:
    """Raises UserError where the native packages are missing or do not match."""
    found, torch = minor("torch-neuronx"), installed("torch")
    if found is None:
        raise UserError(
            "device.name: neuron needs torch-neuronx, which is not installed, got neuron; "
            f"pip install 'torch-neuronx==2.14.*' 'neuronx-cc==2.*' {INDEX}, or device=auto"
        )
    if found not in NATIVE:
        remedy = (
            f"pip install 'torch-neuronx==2.14.*' {INDEX}"
            if native()
            else "it is of the XLA generation: use device=xla"
        )
        raise UserError(
            f"device.name: neuron needs torch-neuronx {' or '.join(NATIVE)}, "
            f"got {installed('torch-neuronx')}; {remedy}"
        )
    if minor("torch") != found:
        raise UserError(
            f"device.name: torch-neuronx {installed('torch-neuronx')} needs torch {found}, got "
            f"torch {torch}; pip install 'torch=={found}.*'"
        )
    _check_compiler()


def check_xla(*, on_neuron: bool) -> None:
    """Raises UserError where the packages of the XLA route are missing or do not match.

    `on_neuron`: libneuronxla will drive Neuron cores; else XLA's own CPU device is meant.
    """
    torch, xla = installed("torch"), installed("torch_xla")
    if xla is None:
        raise UserError("device.name: torch_xla is not installed, got xla; install the `xla` extra")
    if not (minor("torch") == minor("torch_xla") == XLA):
        raise UserError(
            f"device.name: xla needs torch and torch_xla {XLA}, got torch {torch} and torch_xla "
            f"{xla}; pip install 'torch=={XLA}.*' 'torch_xla=={XLA}.*'"
        )
    if on_neuron:
        _check_compiler()


def _check_compiler() -> None:
    if installed("neuronx-cc") is None and shutil.which("neuronx-cc") is None:
        raise UserError(
            "device.name: Neuron's compiler neuronx-cc must be installed, got none; "
            f"pip install 'neuronx-cc==2.*' {INDEX}"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]
