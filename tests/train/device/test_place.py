"""The first stage knows where a device keeps its compiled files."""

from dataclasses import replace
from pathlib import Path

import torch

from models.device.device import Device
from train.device.place import find_cache_folder


def test_a_device_tells_the_folder_of_its_compiled_files(monkeypatch):
    eager = Device(name="cpu", torch_device=torch.device("cpu"), dtype=torch.float32, compiles=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/inductor")
    assert (find_cache_folder(eager), find_cache_folder(replace(eager, compiles=True))) == (None, Path("/inductor"))
    neuron = replace(eager, name="neuron", compiles=True)
    monkeypatch.delenv("TORCH_NEURONX_NEFF_CACHE_DIR", raising=False)
    assert find_cache_folder(neuron) is None
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", "/neff")
    assert find_cache_folder(neuron) == Path("/neff")
