"""Where tensors live and how functions are compiled: the only package that names hardware."""

from models.device.config import DeviceConf, DeviceName, Precision
from models.device.hardware import Device, graphs

__all__ = ["Device", "DeviceConf", "DeviceName", "Precision", "graphs"]
