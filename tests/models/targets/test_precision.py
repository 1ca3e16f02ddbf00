"""`device.precision=auto` takes bf16 where a CPU multiplies in it and the target is large."""

import re
from dataclasses import replace

import pytest
import torch

from conf.entry import compose
from models.device.config import DeviceConf, DeviceName, MachineConf, Precision
from models.device.machine_specs import check_dtype
from models.io.errors import UserError
from models.targets.config import TargetConf
from models.targets.precision import build_device, count_weights, resolve_machine
from tests.support.models.tiny import demo_target
from train.config.run import TrainPlanConf

LARGE = TargetConf(name="Qwen/Qwen3-8B")  # its configuration ships with the package
CPU = DeviceConf(name=DeviceName.cpu)


@pytest.fixture(params=["amx_tile", "avx512_bf16", None])
def has_bf16(request, monkeypatch):
    for name in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name == request.param)
    return request.param is not None


def test_weights_are_counted_from_the_configuration_alone():
    assert count_weights(TargetConf()) == demo_target().num_parameters
    assert 8.1e9 < count_weights(LARGE) < 8.3e9


def test_a_large_target_is_bf16_where_the_cpu_multiplies_in_it(has_bf16, caplog):
    caplog.set_level("INFO")
    device = build_device(CPU, LARGE)
    assert device.dtype is (torch.bfloat16 if has_bf16 else torch.float32)
    assert ("bfloat16, because this CPU" in caplog.text) is has_bf16


def test_a_target_that_fits_the_caches_of_a_cpu_stays_fp32(has_bf16):
    assert build_device(CPU, TargetConf()).dtype is torch.float32


@pytest.mark.parametrize("precision", [Precision.float32, Precision.bfloat16])
def test_a_chosen_precision_is_used(has_bf16, precision):
    for target in (LARGE, TargetConf()):
        device = build_device(replace(CPU, precision=precision), target)
        assert device.dtype is getattr(torch, precision.value)


def test_a_plan_for_this_machine_is_in_the_precision_of_a_run_here(has_bf16):
    machine, dtype = resolve_machine(MachineConf(), CPU, LARGE)
    assert dtype is build_device(CPU, LARGE).dtype
    check_dtype(machine, dtype)


def test_ungrouped_cores_are_twice_as_many_with_half_the_memory_each():
    conf = compose("train_plan", TrainPlanConf, ["machine=trn2.48xlarge"])
    grouped, _ = resolve_machine(conf.machine, conf.device, LARGE)
    assert (grouped.total_cores, grouped.core_bytes) == (64, 24 * 2**30)
    single, _ = resolve_machine(conf.machine, DeviceConf(logical_cores=1), LARGE)
    assert (single.total_cores, single.core_bytes) == (128, 12 * 2**30)
    assert resolve_machine(single, DeviceConf(logical_cores=2), LARGE)[0] == grouped
    with pytest.raises(UserError, match=r"logical_cores: must be null with machine=trn1\.32xlarge, whose"):
        resolve_machine(replace(single, name="trn1.32xlarge", logical_cores=None), DeviceConf(logical_cores=1), LARGE)


@pytest.mark.parametrize("machine", ["trn1.2xlarge", "trn1n.32xlarge", "inf2.xlarge", "inf2.48xlarge"])
def test_an_older_chip_is_planned_for_the_route_that_runs_there(machine):
    conf = compose("train_plan", TrainPlanConf, [f"machine={machine}"])
    with pytest.raises(UserError, match=rf"^device: must be xla with machine={re.escape(machine)}, .* add device=xla$"):
        resolve_machine(conf.machine, conf.device, LARGE)
    assert resolve_machine(conf.machine, DeviceConf(name=DeviceName.xla), LARGE)[0] == conf.machine
