"""Full values of weights that are sharded over processes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor.

    There is none before its module is imported, which takes a second: this does not import it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this process holds, or another tensor as it is."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective: call it on every rank that holds a shard."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else getattr(tensor, "full_value", tensor)


def keep_full_value(shard: Tensor, full: Tensor) -> None:
    """Let `full_tensor` return the full value of a plain tensor that holds a shard of it; it may be on the host."""
    cast(Any, shard).full_value = full


def copy_full(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into one that may be sharded; collective if it is."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        sharded = cast(Any, parameter)
        full = distribute_tensor(full.to(parameter.device), sharded.device_mesh, sharded.placements)
    parameter.copy_(full)


@contextmanager
def full_params(module: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Replace the module's sharded parameters by full, plain ones, of another type if given, while the block runs.

    Collective: enter the block on every rank that holds a shard. The module's forward hooks stay as
    they are: call its submodules, not the module itself.
    """
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if is_sharded(parameter)
    ]
    full = {id(p): nn.Parameter(full_tensor(p.detach().to(dtype)), p.requires_grad) for _, _, p in sharded}
    try:
        for owner, name, parameter in sharded:
            setattr(owner, name, full[id(parameter)])
        yield
    finally:
        for owner, name, parameter in sharded:
            setattr(owner, name, parameter)
