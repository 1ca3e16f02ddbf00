"""The route that records: PyTorch/XLA notes what is computed, and computes it when told to.

A graph is all that was recorded between two syncs, and whatever is alive then is its result. So a
function is made one graph by a sync before it and one behind it. What would compute in its midst,
such as reading a value or an operation that XLA does not have, is an error that says where.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any


def traced(function: Callable) -> Callable:
    """The function as one graph, whose results are still being computed when it returns."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch_xla  # pyright: ignore[reportMissingImports]

        with torch_xla.compile(full_graph=True, name=function.__name__):
            return function(*args, **kwargs)

    return call


def sync(*, wait: bool = False) -> None:
    """Compute what has been recorded."""
    import torch_xla  # pyright: ignore[reportMissingImports]

    torch_xla.sync(wait=wait)


def compiled() -> int:
    """Graphs compiled so far in this process, whoever asked for them.

    What has been recorded until now is one of them, and not of whoever syncs next.
    """
    if "torch_xla" not in sys.modules:
        return 0
    from torch_xla.debug import metrics  # pyright: ignore[reportMissingImports]

    sync()
    return metrics.counter_value("UncachedCompile") or 0
