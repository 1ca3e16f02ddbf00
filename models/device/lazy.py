"""The lazy route: PyTorch/XLA records operations and computes them at the next sync.

A graph is everything recorded between two syncs, and the tensors alive at its end are its results.
A sync before a function and one after it therefore make it one graph. An operation that would force
a sync in between, such as reading a value or one that XLA lacks, raises an error with its location.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any


def trace_function(function: Callable) -> Callable:
    """Make a function one graph, whose results are still being computed when it returns."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch_xla  # pyright: ignore[reportMissingImports]

        with torch_xla.compile(full_graph=True, name=function.__name__):
            return function(*args, **kwargs)

    return call


def sync_graph(*, wait: bool = False) -> None:
    """Compute all recorded operations."""
    import torch_xla  # pyright: ignore[reportMissingImports]

    torch_xla.sync(wait=wait)


def count_lazy_graphs() -> int:
    """Count all graphs compiled so far in this process.

    Pending operations are computed first, so that their graph counts here and not at the next sync.
    """
    if "torch_xla" not in sys.modules:
        return 0
    from torch_xla.debug import metrics  # pyright: ignore[reportMissingImports]

    sync_graph()
    return metrics.counter_value("UncachedCompile") or 0
