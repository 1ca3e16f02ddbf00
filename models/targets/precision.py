"""The precision of a target on a CPU, where the fastest one depends on the target's size.

A CPU without instructions for bf16 multiplies in it several times slower than in fp32. With them (AVX512-BF16, AMX)
it is the other way round once weights come from memory instead of a cache: docs/benchmarks.md.
"""

import logging
from dataclasses import replace

import torch

from models.device.config import LOCAL_MACHINE, DeviceConf, MachineConf, Precision
from models.device.device import Device
from models.device.machine_specs import check_route, measure_machine
from models.device.opening import open_device
from models.io.errors import UserError, require
from models.targets.config import ModelSource
from models.targets.pretrained import build_planning_model

log = logging.getLogger(__name__)

LARGE_TARGET_WEIGHTS = 100_000_000  # more than caches hold, in either precision


def build_device(conf: DeviceConf, target: ModelSource) -> Device:
    """Build the device; `precision=auto` takes what is fastest for this target there."""
    device = open_device(conf)
    if conf.precision is not Precision.auto or not _multiplies_bf16(device):
        return device
    weights = count_weights(target)
    if weights < LARGE_TARGET_WEIGHTS:
        return device
    log.info(
        "precision: bfloat16, because this CPU has instructions for it and the %s has %d million "
        "weights; device.precision=float32 overrides",
        target.config_key,
        weights // 10**6,
    )
    return replace(device, dtype=torch.bfloat16)


def resolve_machine(machine: MachineConf, conf: DeviceConf, target: ModelSource) -> tuple[MachineConf, torch.dtype]:
    """Return a machine, measured if it is `here`, with the target's number type on it.

    `device.memory_gib` replaces the memory of its cores; `device.logical_cores` divides its chips into other ones.
    """
    if machine.name == LOCAL_MACHINE:
        require(
            machine == MachineConf(),
            f"machine: must be named if its figures are set, got some with machine={LOCAL_MACHINE}, which is measured; "
            "leave them out, or set device.memory_gib",
        )
        device = build_device(conf, target)
        machine, dtype = measure_machine(device), device.dtype
    else:
        check_route(machine, conf)
        for name in ("memory_gib", "bandwidth_gb_s"):
            value = getattr(machine, name)
            require(value > 0, f"machine.{name}: must be positive, got {value}; set the published figure")
        dtype = torch.float32 if conf.precision is Precision.float32 else torch.bfloat16
        if conf.logical_cores is not None:
            if machine.logical_cores is None:
                raise UserError(
                    f"device.logical_cores: must be null with machine={machine.name}, whose cores are not grouped, "
                    f"got {conf.logical_cores}; leave it out"
                )
            physical_cores = machine.cores * machine.logical_cores
            machine = replace(machine, cores=physical_cores // conf.logical_cores, logical_cores=conf.logical_cores)
    if conf.memory_gib is not None:
        machine = replace(machine, memory_gib=conf.memory_gib * machine.cores)
    return machine, dtype


def count_weights(source: ModelSource) -> int:
    """Return the number of a model's weights, from its configuration alone."""
    return sum(p.numel() for p in build_planning_model(source, torch.float32).parameters())


def _multiplies_bf16(device: Device) -> bool:
    """Return whether the device is a CPU with instructions for bf16."""
    # no public names in torch 2.9
    return device.name == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
