"""Requirements of the XLA route: packages that fit together, a device, and a cache of graphs."""

import os
from pathlib import Path

from models.device.host import Host
from models.device.packages import XLA_VERSION, check_compiler, installed_version, minor_version
from models.io.errors import require

CACHE_VARIABLE = "NEURON_COMPILE_CACHE_URL"
DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"  # the route stores graphs here by default


def check_xla(host: Host, *, on_neuron: bool) -> None:
    """Raise UserError if the device or the packages of the route are missing or do not match.

    With `on_neuron`, libneuronxla runs on Neuron cores; else the device is XLA's own CPU device.
    """
    require(
        host.has_neuron or not on_neuron,
        "device.name: libneuronxla needs a Neuron device, got none at /dev/neuron*; use a "
        "Trainium instance (in a container: --device=/dev/neuron0), or pip uninstall "
        "libneuronxla for XLA's own CPU device",
    )
    torch, xla = installed_version("torch"), installed_version("torch_xla")
    require(xla is not None, "device.name: torch_xla is not installed, got xla; install the `xla` extra")
    require(
        minor_version("torch") == minor_version("torch_xla") == XLA_VERSION,
        f"device.name: xla needs torch and torch_xla {XLA_VERSION}, got torch {torch} and "
        f"torch_xla {xla}; pip install 'torch=={XLA_VERSION}.*' 'torch_xla=={XLA_VERSION}.*'",
    )
    if on_neuron:
        check_compiler()


def check_cache_location(cache: str | None, host: Host) -> None:
    """Raise UserError for a cache on a file system that several hosts may share.

    `cache` None is the cache of the environment, or the default one.
    """
    cache = cache or os.environ.get(CACHE_VARIABLE, DEFAULT_CACHE)
    filesystem = None if "://" in cache else host.network_filesystem(Path(cache))
    require(
        filesystem is None,
        f"device.cache_dir: the XLA route's cache must be this host's own or on S3, as hosts "
        f"that share a folder corrupt it, got {cache} on {filesystem}; use "
        f"{DEFAULT_CACHE} or s3://",
    )
