"""Shard a module's weights in units: no collective gathers or reduces more than the weight of a layer.

FSDP2 gathers a unit at each call of its forward, and reduces its gradients as often. A draft calls a layer once for
every step of its unroll, and losses read heads without a call. So all units are gathered, one after the other, where
the module's forward begins, and reduced where its backward ends.
"""

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from models.parallel.dtensor import replaced_params


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
    sizes = (
        sum(parameter.numel() for parameter in layers[0].parameters()) * choose_dtype(layers, dtype).itemsize
        for layers in list_units(module)
    )
    return max(sizes, default=0)


def gathered_copies(module: nn.Module, dtype: torch.dtype) -> AbstractContextManager[list[nn.Parameter]]:
    """Let a module that is not sharded compute with copies of its weights, as `shard_in_units` would gather them."""
    dtypes = {
        id(parameter): choose_dtype(layers, dtype)
        for layers in list_units(module)
        for parameter in layers[0].parameters()
    }
    return replaced_params(
        module,
        lambda parameter: parameter.detach().to(dtypes.get(id(parameter), parameter.dtype), copy=True),
        where=lambda _: True,
    )


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
