"""Memory that a device does not have, told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models.io.errors import UserError

# What PyTorch's allocators say in a RuntimeError, which only that of CUDA has a class for.
ALLOCATION_FAILURES = ("can't allocate memory", "out of memory")


@contextmanager
def report_out_of_memory(message: str) -> Iterator[None]:
    """Raise UserError with `message` if an allocation in the block fails."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(message) from error
    except RuntimeError as error:
        if not any(failure in str(error).lower() for failure in ALLOCATION_FAILURES):
            raise
        raise UserError(message) from error
