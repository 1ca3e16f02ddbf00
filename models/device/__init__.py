"""Devices: where tensors live, how functions are compiled.

A new kind of device gets a name (config.py), a rule that chooses it (route_choice.py), a Device or
a subclass of it (device.py), and a YAML in conf/device/.
"""

from models.device.neuron_packages import guard_torch_autoload

guard_torch_autoload()  # must precede the first import of torch, which follows

from models.device.config import DeviceConf, DeviceName, Precision, matmul_dtype  # noqa: E402
from models.device.device import Device  # noqa: E402
from models.device.xla.nxd_checkpoint import find_rank_files, load_rank_files  # noqa: E402

__all__ = [
    "Device",
    "DeviceConf",
    "DeviceName",
    "Precision",
    "find_rank_files",
    "load_rank_files",
    "matmul_dtype",
]
