"""Weights of which each process holds a part, seen whole."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Every process that holds a part of it must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """The module's parameters are whole, and plain ones, while the block runs.

    Its forward hooks are left alone: parts of the module may be called, the module itself may not.
    """
    parts = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    full = {
        id(parameter): nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
        for _, _, parameter in parts
    }
    try:
        for owner, name, parameter in parts:
            setattr(owner, name, full[id(parameter)])
        yield
    finally:
        for owner, name, parameter in parts:
            setattr(owner, name, parameter)
