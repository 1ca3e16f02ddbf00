"""Open the device of a configuration: choose its route, set its environment and its threads."""

import logging

import torch

from models.device.config import DeviceConf, Precision
from models.device.device import Device
from models.device.host import Host
from models.device.neuron_packages import PACKAGES, installed_version
from models.device.route_choice import can_compile, choose_route, is_neuron_route, open_route

log = logging.getLogger(__name__)


def matmul_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the number type in which large matrix products are computed.

    CPUs without matrix units for bf16 compute them several times slower than in fp32.
    """
    if precision is Precision.auto:
        precision = Precision.float32 if device.type == "cpu" else Precision.bfloat16
    return getattr(torch, precision.value)


def open_device(conf: DeviceConf) -> Device:
    """Choose a device, log why, set its environment variables and threads, and return it.

    Raise UserError if it is unavailable.
    """
    if conf.threads is not None:
        torch.set_num_threads(conf.threads)
    host = Host()
    route, reason = choose_route(conf.name.value, host)
    # Before the device is opened, because compiler and runtime read the variables then.
    environment = conf.set_environment(route, on_neuron=is_neuron_route(route), host=host)
    log.info("device: %s, %s (%s)", route, reason, _describe_host(host))
    device_class, torch_device = open_route(route)
    return device_class(
        name=route,
        torch_device=torch_device,
        dtype=matmul_dtype(conf.precision, torch_device),
        # PyTorch/XLA computes everything as compiled graphs, whatever `compile` says.
        compiles=route == "xla" or (conf.compile and can_compile(route)),
        backend="neuron" if route == "neuron" else "inductor",
        threads=conf.threads,
        instance_type=host.instance_type,
        environment=environment,
    )


def _describe_host(host: Host) -> str:
    """Return the packages and the hardware that the choice depends on, as text."""
    packages = [f"{name} {version}" for name in PACKAGES if (version := installed_version(name))]
    hardware = [host.instance_type or "", "/dev/neuron*" if host.has_neuron else ""]
    return ", ".join([*packages, *filter(None, hardware)])
