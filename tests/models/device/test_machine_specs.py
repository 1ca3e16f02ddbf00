"""The figures of this machine are measured in a short time on any machine."""

import time

import pytest
import torch

from conf.entry import compose
from models.device import machine_specs
from models.device.config import MachineConf
from models.device.machine_specs import LARGEST_MATRIX, check_dtype, core_flops, measure_machine
from models.io.errors import UserError
from models.targets.precision import resolve_machine
from tests.support.models.tiny import CPU
from train.config.run import TrainPlanConf


@pytest.mark.parametrize("seconds", [machine_specs.MEASURE_SECONDS, 0.0])
def test_this_machine_is_measured_however_busy_it_is(monkeypatch, seconds):
    monkeypatch.setattr(machine_specs, "MEASURE_SECONDS", seconds)
    machine = measure_machine(CPU)
    assert machine.chips == machine.cores == 1
    assert machine.memory_gib > 0.5
    assert machine.bandwidth_gb_s > 0
    assert set(machine.tflops) == {"float32"}
    check_dtype(machine, torch.float32)


@pytest.mark.parametrize(("gflops", "size"), [(1, 512), (1000, LARGEST_MATRIX)])
def test_matrices_are_as_large_as_the_time_allows(monkeypatch, gflops, size):
    """A CPU without instructions for bf16 does 1 GFLOP a second: its products would take minutes."""
    clock, sizes = [0.0], []

    def multiply(left, right):
        clock[0] += 2 * len(left) ** 3 / (gflops * 1e9)
        sizes.append(len(left))
        return left

    def read_clock():
        clock[0] += 1e-4
        return clock[0]

    monkeypatch.setattr(machine_specs, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(torch, "matmul", multiply)
    monkeypatch.setattr(time, "perf_counter", read_clock)
    machine = measure_machine(CPU)
    assert machine.tflops["float32"] == pytest.approx(gflops / 1000, rel=0.05)
    assert sizes[-1] == max(sizes) == size


def test_a_machine_without_a_figure_for_fp32_has_that_of_another_type():
    machine = MachineConf(name="m", tflops={"bfloat16": 100.0})
    assert core_flops(machine, torch.bfloat16) == 100e12 / machine.cores


def resolve_zeroed(key):
    conf = compose("train_plan", TrainPlanConf, ["draft=demo", "machine=trn2.3xlarge", f"machine.{key}=0"])
    return resolve_machine(conf.machine, conf.device, conf.target)


@pytest.mark.parametrize("key", ["memory_gib", "bandwidth_gb_s", "tflops.bfloat16"])
def test_figures_of_a_machine_are_positive(key):
    with pytest.raises(UserError, match=r"^machine.\w+: must be positive, got .*0"):
        resolve_zeroed(key)
