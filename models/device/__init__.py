"""Where tensors live and how functions are compiled: the only package that names hardware."""

from models.device.neuron_packages import let_torch_load

let_torch_load()  # before the first import of torch, which is in what follows

from models.device.config import DeviceConf, DeviceName, Precision, matmul_dtype  # noqa: E402
from models.device.hardware import Device, graphs  # noqa: E402

__all__ = [
    "Device",
    "DeviceConf",
    "DeviceName",
    "Precision",
    "graphs",
    "matmul_dtype",
]
