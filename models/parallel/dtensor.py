"""Full values of weights that are sharded over processes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective: call it on every rank that holds a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def full_params(module: nn.Module) -> Iterator[None]:
    """Replace the module's sharded parameters by full, plain ones while the block runs.

    Collective: enter the block on every rank that holds a shard.

    The module's forward hooks stay as they are: call its submodules, not the module itself.
    """
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    full = {
        id(parameter): nn.Parameter(full_tensor(parameter.detach()), parameter.requires_grad)
        for _, _, parameter in sharded
    }
    try:
        for owner, name, parameter in sharded:
            setattr(owner, name, full[id(parameter)])
        yield
    finally:
        for owner, name, parameter in sharded:
            setattr(owner, name, parameter)
