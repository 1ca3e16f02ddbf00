"""A command takes the configured device, or says in a line that it is missing."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from models.device import opening
from models.device.config import DeviceConf, DeviceName, Precision
from models.device.device import Device
from models.device.machine_specs import read_process_bytes
from models.device.memory_watch import CLEAR_REFS, MemoryWatch, report_out_of_memory
from models.device.opening import open_device
from models.io.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def only_cpu(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)


def test_auto_takes_the_cpu_where_there_is_no_accelerator(only_cpu):
    device = open_device(DeviceConf(compile=False))
    assert (device.name, device.torch_device.type) == ("cpu", "cpu")
    assert device.dtype is torch.float32
    assert device.describe() == {
        "name": "cpu",
        "kind": device.describe()["kind"],
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "compiled": False,
        "environment": {},
    }
    device.synchronize()


def test_a_missing_device_is_refused(only_cpu):
    with pytest.raises(UserError) as refused:
        open_device(DeviceConf(name=DeviceName.cuda))
    assert str(refused.value) == "device.name: PyTorch sees cpu here, got cuda; use device=auto"


def test_another_accelerator_is_named_in_the_refusal(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    with pytest.raises(UserError, match="PyTorch sees cpu and mps here, got cuda"):
        open_device(DeviceConf(name=DeviceName.cuda))


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_auto_does_not_take_an_untested_accelerator_and_says_so(monkeypatch, caplog, name):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    seen = torch.device(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: seen)
    device = open_device(DeviceConf(compile=False))
    assert (device.name, device.torch_device.type, device.dtype) == ("cpu", "cpu", torch.float32)
    messages = [line for line in caplog.messages if line.startswith("device=auto")]
    assert messages == [f"device=auto takes CUDA, Neuron or the CPU, not {name}: running on the CPU"]


@pytest.mark.parametrize(
    ("asked", "got"),
    [(Precision.auto, torch.float32), (Precision.float32, torch.float32), (Precision.bfloat16, torch.bfloat16)],
)
def test_precision_is_that_of_the_configuration(only_cpu, asked, got):
    assert open_device(DeviceConf(precision=asked, compile=False)).dtype is got


def test_zero_threads_are_refused():
    with pytest.raises(UserError, match=r"device\.threads: must be at least 1, got 0"):
        DeviceConf(threads=0)


def test_a_missing_compiler_is_reported_once_and_functions_run_eagerly(only_cpu, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler there
    opening.can_compile.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            devices = [open_device(DeviceConf()) for _ in range(3)]
    finally:
        opening.can_compile.cache_clear()
    assert [device.compiles for device in devices] == [False] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "no C++ compiler found: compiled parts run eagerly (install g++ for full speed)"
    ]
    assert devices[0].compile(sum) is sum


def test_a_function_may_have_many_shapes():
    """Each bucket of prompts and each tree needs a graph; by default torch gives up after eight."""
    device = Device(name="cpu", torch_device=torch.device("cpu"), dtype=torch.float32, compiles=True, backend="eager")
    double = device.compile(lambda x: x * 2)
    before = device.count_graphs()
    for size in range(2, 14):
        assert torch.equal(double(torch.ones(size)), torch.full((size,), 2.0))
    assert device.count_graphs() - before == 12
    double(torch.ones(5))
    assert device.count_graphs() - before == 12


@pytest.mark.parametrize(("chosen", "weights", "during"), [(None, 70_000, 1), (None, 10_000_000, 3), (2, 70_000, 2)])
def test_tiny_layers_are_not_shared_among_threads_unless_the_user_says_so(chosen, weights, during):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        device = open_device(DeviceConf(name=DeviceName.cpu, threads=chosen))
        outside = torch.get_num_threads()
        with device.cpu_threads_for(weights):
            assert torch.get_num_threads() == during
        assert torch.get_num_threads() == outside
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("numbers", [2**45, 2**55])
def test_missing_memory_is_reported_in_a_single_line(numbers):
    with pytest.raises(UserError, match=r"^batch: lower it$"), report_out_of_memory("batch: lower it"):
        torch.empty(numbers)


def test_other_errors_pass_unchanged():
    with pytest.raises(RuntimeError, match="shape"), report_out_of_memory("batch: lower it"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_the_memory_of_neuron_cores_is_what_their_module_says(monkeypatch):
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=24 * 2**30), max_memory_allocated=lambda: 7
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    device = Device(name="neuron", torch_device=CPU, dtype=torch.bfloat16, compiles=False)
    assert read_process_bytes(device) == 24 * 2**30
    assert MemoryWatch(device).peak_bytes() == 7


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="the system keeps the peak of a process")
def test_a_watch_leaves_out_a_peak_before_it():
    """Memory of this size is returned to the system when it is freed."""
    torch.ones(2**27)
    watch = MemoryWatch(Device(name="cpu", torch_device=CPU, dtype=torch.float32, compiles=False))
    assert watch.peak_bytes() < 2**28
    torch.ones(2**27)
    assert watch.peak_bytes() > 2**28
