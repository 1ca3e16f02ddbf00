"""A native Neuron package over host memory: a device, its module and the name of its compiler.

PyTorch loads it by its entry point, like the real package: no code imports it.
"""

import os
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import psutil
import torch


def autoload() -> None:
    """Register the device in PyTorch's open slot. The test builds the library and names it in the environment."""
    torch.ops.load_library(os.environ["NEURON_OVER_HOST"])
    torch.utils.rename_privateuse1_backend("neuron")
    torch.ops.neuron_over_host.register()
    torch._register_device_module("neuron", _module())
    torch.utils.generate_methods_for_privateuse1_backend()


class _OnlyDevice:
    """The context `with torch.neuron.device(0)`: there is a single device."""

    def __init__(self, index: int):
        self.index = index

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _module() -> ModuleType:
    own = torch.ops.neuron_over_host
    module = ModuleType("torch.neuron")
    functions = {
        "device": _OnlyDevice,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "current_stream": torch.accelerator.current_stream,
        "stream": nullcontext,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=psutil.virtual_memory().total),
        "max_memory_allocated": lambda device=None: psutil.Process().memory_info().rss,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "manual_seed": own.seed,
        "manual_seed_all": own.seed,
        "get_rng_state": lambda device=None: own.get_state(),
        "set_rng_state": lambda state, device=None: own.set_state(state),
        "get_rng_state_all": lambda: [own.get_state()],
        "set_rng_state_all": lambda states: own.set_state(*states),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
