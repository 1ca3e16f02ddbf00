"""Shard a module's weights in units: no collective gathers or reduces more than the weight of a layer.

FSDP2 gathers a unit at each call of its forward, and reduces its gradients as often. A draft calls a layer once for
every step of its unroll, and losses read heads without a call. So all units are gathered, one after the other, where
the module's forward begins, and reduced where its backward ends. Heads that the loss reads by rows are no units.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


def list_units(module: nn.Module, split_heads: Sequence[nn.Linear] = ()) -> list[list[nn.Module]]:
    """Return the linear layers and embeddings of a module but for `split_heads`, those that share a weight together."""
    units: dict[int, list[nn.Module]] = defaultdict(list)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding) and layer not in split_heads:
            units[id(layer.weight)].append(layer)
    return [*units.values()]


def choose_dtype(layers: list[nn.Module], dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a unit is gathered: `dtype`, but that of the weights of embeddings that learn."""
    weight = cast(nn.Linear, layers[0]).weight
    is_table = any(isinstance(layer, nn.Embedding) for layer in layers)
    return weight.dtype if is_table and weight.requires_grad else dtype


def count_largest_bytes(module: nn.Module, dtype: torch.dtype, split_heads: Sequence[nn.Linear] = ()) -> int:
    """Return the bytes of the largest unit as it is gathered, 0 without any."""
    sizes, units = count_gathered_bytes(module, dtype), list_units(module, split_heads)
    return max((sum(map(sizes.__getitem__, layers[0].parameters())) for layers in units), default=0)


def count_gathered_bytes(
    module: nn.Module, dtype: torch.dtype, split_heads: Sequence[nn.Linear] = ()
) -> dict[nn.Parameter, int]:
    """Return the bytes of each weight as it is gathered, those outside of units as they are, of `split_heads` none."""
    dtypes = {weight: choose_dtype(layers, dtype) for layers in list_units(module) for weight in layers[0].parameters()}
    sizes = {weight: weight.numel() * dtypes.get(weight, weight.dtype).itemsize for weight in module.parameters()}
    return sizes | dict.fromkeys((weight for head in split_heads for weight in head.parameters()), 0)


def shard_in_units(
    module: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype, split_heads: Sequence[nn.Linear] = ()
) -> None:
    """Shard a module over the mesh; units are gathered as `choose_dtype` has it, gradients are summed in fp32.

    The mesh's device takes the weights of the host a unit at a time. Of `split_heads`, each process holds rows that are
    never gathered.
    """
    for head in split_heads:
        whole = head.weight.detach()
        whole = whole if whole.is_meta else whole.to(mesh.device_type)
        rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        head.weight = nn.Parameter(rows)
    units = list_units(module, split_heads)
    for layers in units:
        policy = MixedPrecisionPolicy(param_dtype=choose_dtype(layers, dtype), reduce_dtype=torch.float32)
        fully_shard(layers, mesh=mesh, mp_policy=policy)
        state = cast(Any, fully_shard).state(layers[0])
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
    fully_shard(module, mesh=mesh, ignored_params={weight for head in split_heads for weight in head.parameters()})
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
