"""First stage: what is installed, what the machine has, and whether caches can be written."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from models.device.device import Device
from models.device.memory_watch import MemoryWatch
from models.device.neuron_env import CACHE_FOLDERS
from models.device.opening import can_compile
from models.device.packages import PACKAGES, installed_version
from train.device.checks import Check, CheckContext, CheckFailedError, CheckSkippedError, confirm

ALLOCATED_BYTES = 256 << 20
MIN_FREE_BYTES = 10 << 30  # compiled graphs of a large target take gigabytes


def list_checks(context: CheckContext) -> Iterator[Check]:
    device = context.device
    for name, run, remedy in (
        ("versions", lambda _: describe_versions(), "install by a script of scripts/ (docs/trainium.md)"),
        ("hardware", describe_hardware, "read the driver's own tool: nvidia-smi or neuron-ls"),
        ("compiler", find_compiler, "put the environment's bin folder on PATH, or set it up"),
        ("cache of graphs", check_cache, "set device.cache_dir to a folder on a disk that survives, with 10 GiB free"),
        ("memory figures", check_peak, "plans cannot be compared with the device; set device.memory_gib by hand"),
    ):
        yield Check(name=name, run=partial(run, device), remedy=remedy)


def describe_versions() -> str:
    packages = ("torch", "transformers", "accelerate", "datasets", *PACKAGES)
    versions = [f"{name} {version}" for name in dict.fromkeys(packages) if (version := installed_version(name))]
    return ", ".join([f"Python {platform.python_version()}", *versions, platform.platform(terse=True)])


def describe_hardware(device: Device) -> str:
    facts = device.describe()
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    settings = [f"{name}={value}" for name, value in facts["environment"].items()]
    return ", ".join([facts["kind"], f"{count} accelerators", f"computes in {facts['dtype']}", *settings])


def find_compiler(device: Device) -> str:
    """Return the compiler of the device's graphs; on Neuron the backend looks for it on PATH."""
    if not device.compiles and device.name != "cpu":
        raise CheckSkippedError("device.compile is false")
    if device.name == "xla" and importlib.metadata.packages_distributions().get("libneuronxla") is None:
        return "part of PyTorch/XLA"
    tools = {"cpu": ("g++", "clang++", "c++"), "cuda": ("ptxas", "gcc")}.get(device.name, ("neuronx-cc",))
    paths = [path for tool in tools if (path := shutil.which(tool))]
    if device.name == "cuda" and importlib.util.find_spec("triton"):
        paths.insert(0, f"triton {importlib.metadata.version('triton')}")
    if not paths or not can_compile(device.name):
        raise CheckFailedError(f"none of {', '.join(tools)} is on PATH")
    return ", ".join(paths)


def find_cache_folder(device: Device) -> Path | None:
    """Return the folder of compiled files, or None if nothing is compiled or the environment leaves it open."""
    if not device.compiles:
        return None
    if device.name in CACHE_FOLDERS:
        folder = os.environ.get(next(iter(CACHE_FOLDERS[device.name])))
        return None if folder is None else Path(folder)
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # deferred: slow to import

    return Path(cache_dir())


def check_cache(device: Device) -> str:
    folder = find_cache_folder(device)
    if folder is None:
        raise CheckSkippedError("no folder is known in which this device keeps its graphs")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(1024))
    free = shutil.disk_usage(folder).free
    return confirm(free >= MIN_FREE_BYTES, f"{folder}, {free / 2**30:.1f} GiB free")


def check_peak(device: Device) -> str:
    """Check that the device's own figure of its peak contains a tensor of known size."""
    watch = MemoryWatch(device)
    tensor = torch.ones(ALLOCATED_BYTES // 4, device=device.torch_device)
    device.synchronize()
    peak = watch.peak_bytes()
    if peak is None:
        raise CheckSkippedError("the device tells no peak, so plans cannot be compared with it")
    measured = f"a tensor of {tensor.nbytes >> 20} MiB raised the peak by {peak >> 20}"
    return confirm(peak >= ALLOCATED_BYTES - (64 << 20), measured)
