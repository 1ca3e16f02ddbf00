"""The device of PyTorch/XLA, which records operations and computes them at the next sync.

A sync before a function and one after it make it one graph, whose results are the tensors alive at
its end. What would force a sync in between raises an error with its location; see docs/xla.md.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from models.device.device import Device
from models.device.graph_budget import GraphLedger


def open_xla_device() -> torch.device:
    """Change a setting of PyTorch for moving modules to the device, and return the device."""
    import torch_xla  # pyright: ignore[reportMissingImports]

    # Otherwise a module moved to XLA gets new parameters, and tied weights are no longer tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return torch_xla.device()


def register_backend() -> None:
    """Register the backend of process groups with PyTorch."""
    import torch_xla.distributed.xla_backend  # noqa: F401  # pyright: ignore[reportMissingImports]


class XlaDevice(Device):
    """A lazy device: a whole step is one graph, whose results are still computed as it returns."""

    lazy = True

    def _compile_function(self, function: Callable, frozen_names: tuple[str, ...], kind: str) -> Callable:  # noqa: ARG002
        """Return the function with a sync before and after it, so that each call is one graph."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            import torch_xla  # pyright: ignore[reportMissingImports]

            with torch_xla.compile(full_graph=True, name=function.__name__):
                return function(*args, **kwargs)

        return call

    def eager(self) -> Device:
        """Return a copy whose graphs count in no run's budget; it compiles too: XLA always does."""
        return replace(self, ledger=GraphLedger())

    def synchronize(self) -> None:
        import torch_xla  # pyright: ignore[reportMissingImports]

        torch_xla.sync(wait=True)

    @staticmethod
    def count_graphs() -> int:
        """Return the number of graphs compiled so far in this process.

        Pending operations are computed first, so that their graph counts here and not at the next sync.
        """
        import torch_xla  # pyright: ignore[reportMissingImports]
        from torch_xla.debug import metrics  # pyright: ignore[reportMissingImports]

        torch_xla.sync()
        return Device.count_graphs() + (metrics.counter_value("UncachedCompile") or 0)
