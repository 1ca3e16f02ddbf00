"""Shard a module's weights in units: no collective gathers or reduces more than the weight of a layer.

FSDP2 gathers a unit at each call of its forward, and reduces its gradients as often. A draft calls a layer once for
every step of its unroll, and losses read heads without a call. So all units are gathered, one after the other, where
the module's forward begins, and reduced where its backward ends.
"""

from collections import defaultdict
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def list_units(module: nn.Module) -> list[list[nn.Module]]:
    """Return the linear layers and embeddings of a module, those that share a weight together."""
    units: dict[int, list[nn.Module]] = defaultdict(list)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            units[id(layer.weight)].append(layer)
    return [*units.values()]


def choose_dtype(layers: list[nn.Module], dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a unit is gathered: `dtype`, but that of the weights of embeddings that learn."""
    weight = cast(nn.Linear, layers[0]).weight
    is_table = any(isinstance(layer, nn.Embedding) for layer in layers)
    return weight.dtype if is_table and weight.requires_grad else dtype


def count_largest_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the largest unit as it is gathered, 0 without any."""
    sizes = count_gathered_bytes(module, dtype)
    return max((sum(map(sizes.__getitem__, layers[0].parameters())) for layers in list_units(module)), default=0)


def count_gathered_bytes(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, int]:
    """Return the bytes of each weight as it is gathered, those outside of units as they are."""
    dtypes = {weight: choose_dtype(layers, dtype) for layers in list_units(module) for weight in layers[0].parameters()}
    return {weight: weight.numel() * dtypes.get(weight, weight.dtype).itemsize for weight in module.parameters()}


def shard_in_units(module: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype) -> None:
    """Shard a module over the mesh; units are gathered as `choose_dtype` has it, gradients are summed in fp32."""
    units = list_units(module)
    for layers in units:
        policy = MixedPrecisionPolicy(param_dtype=choose_dtype(layers, dtype), reduce_dtype=torch.float32)
        fully_shard(layers, mesh=mesh, mp_policy=policy)
        state = cast(Any, fully_shard).state(layers[0])
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
    fully_shard(module, mesh=mesh)
    parts = [cast(FSDPModule, part) for part in (*(layers[0] for layers in units), module)]

    def gather(*_: object) -> None:
        for part in parts:
            part.unshard()

    def free(*_: object) -> None:
        if not torch.is_grad_enabled():  # else the backward pass frees what was gathered
            for part in parts:
                part.reshard()

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(free)


def shard_rows(tensor: Float[Tensor, "rows ..."], *, ranks: int, rank: int) -> Float[Tensor, "shard_rows ..."]:
    """Return the shard of one process, padded with zeros along the first axis.

    >>> import torch
    >>> [shard_rows(torch.arange(1.0, 6.0), ranks=3, rank=rank).tolist() for rank in range(3)]
    [[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]
    """
    rows_per_rank = -(-len(tensor) // ranks)  # rounded up
    # F.pad takes (before, after) pairs from the last axis to the first.
    padded = F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, rows_per_rank * ranks - len(tensor)])
    return padded.narrow(0, rank * rows_per_rank, rows_per_rank)
