"""Neuron's packages: which are installed, and whether their versions fit together.

Two generations share names. The native one (`torch-neuronx` 2.13 and 2.14) fills PyTorch's open
device slot; the older one (2.9 and below) builds on `torch_xla`. Under some of the names PyPI has
placeholders, which can be imported but do nothing.
"""

import os
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version

from models.io.errors import require

PIP_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
PLACEHOLDERS = {"torch-neuronx": "1.0", "neuronx-distributed": "0.1", "vllm-neuron": "0.1"}
NATIVE_VERSIONS = ("2.13", "2.14")
XLA_VERSION = "2.9"
PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "torch_xla", "libneuronxla", "neuronx-distributed")
XLA_PACKAGES = ("torch_xla", "libneuronxla", "neuronx-distributed")
SPIN_COUNT = "5000"  # turns; GNU's default is 300,000


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
    """Keep PyTorch from loading a native package that is made for a different version of it.

    PyTorch would load it when it is imported, and fail with a traceback; `check_native` raises a
    UserError instead. Call this before torch is imported: it sets an environment variable.
    """
    if is_native() and minor_version("torch-neuronx") != minor_version("torch"):
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def limit_spinning() -> None:
    """Let idle threads of GNU's OpenMP, by which PyTorch's wheels compute on Linux, soon give way to other processes.

    By default they spin for milliseconds at the end of every product, as if no other process wanted the core
    (docs/decoding.md has figures). Call this before torch is imported, which loads the library.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def check_package_mix() -> None:
    """Raise UserError for placeholders, and for packages of both generations."""
    for name, placeholder in PLACEHOLDERS.items():
        require(
            minor_version(name) != placeholder,
            f"device.name: {name} must come from Neuron's own index, got PyPI's placeholder "
            f"{installed_version(name)}; pip uninstall {name}, then pip install {name} {PIP_INDEX}",
        )
    xla_packages = [name for name in XLA_PACKAGES if installed_version(name)]
    require(
        not (is_native() and xla_packages),
        f"device.name: native torch-neuronx {installed_version('torch-neuronx')} must stand "
        f"alone, got {', '.join(xla_packages)} of the XLA generation beside it; "
        f"pip uninstall {' '.join(xla_packages)}",
    )


def check_native() -> None:
    """Raise UserError if the native packages are missing or do not match."""
    version = minor_version("torch-neuronx")
    require(
        version is not None,
        "device.name: neuron needs torch-neuronx, which is not installed, got neuron; "
        f"pip install 'torch-neuronx==2.14.*' 'neuronx-cc==2.*' {PIP_INDEX}, or device=auto",
    )
    remedy = (
        f"pip install 'torch-neuronx==2.14.*' {PIP_INDEX}"
        if is_native()
        else "it is of the XLA generation: use device=xla"
    )
    require(
        version in NATIVE_VERSIONS,
        f"device.name: neuron needs torch-neuronx {' or '.join(NATIVE_VERSIONS)}, "
        f"got {installed_version('torch-neuronx')}; {remedy}",
    )
    require(
        minor_version("torch") == version,
        f"device.name: torch-neuronx {installed_version('torch-neuronx')} needs torch "
        f"{version}, got torch {installed_version('torch')}; pip install 'torch=={version}.*'",
    )
    check_compiler()


def check_compiler() -> None:
    """Raise UserError unless Neuron's compiler is on PATH, where alone the backend looks."""
    remedy = (
        f"pip install 'neuronx-cc==2.*' {PIP_INDEX}"
        if installed_version("neuronx-cc") is None
        else f"it is installed: export PATH={sysconfig.get_path('scripts')}:$PATH"
    )
    require(
        shutil.which("neuronx-cc") is not None,
        f"device.name: Neuron's compiler neuronx-cc must be on PATH, got none there; {remedy}",
    )


def _version_numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]
