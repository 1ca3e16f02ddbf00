"""Passes of a split model without gradients, on plain tensors.

transformers splits weights into DTensors, whose dispatch takes longer than a small pass does, and which PyTorch cannot
trace inside a repeated region. Here each layer multiplies by this rank's part of its weights, as a plain tensor, and
joins what the ranks computed by collectives that graphs may contain. Passes with gradients stay those of transformers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.parallel.dtensor import is_sharded
from models.parallel.tensor_parallel import EMBEDDING_STYLES, INPUT_AXIS, LINEAR_STYLES, ShardStyle, find_style


@dataclass(frozen=True, kw_only=True)
class LocalLayer:
    """A layer with this rank's part of its weights, and how the parts of the output are joined."""

    layer: Any  # a copy, whose parameters are plain
    style: ShardStyle
    group: Any  # name of the process group
    ranks: int
    rank: int
    with_gradients: Callable[..., Tensor]  # the forward of transformers

    def sum(self, part: Tensor) -> Tensor:
        return collectives.all_reduce(part, "sum", self.group)

    def gather(self, part: Float[Tensor, "*rows part"]) -> Float[Tensor, "*rows features"]:
        gathered = collectives.all_gather_single(part.contiguous(), 0, self.group)
        return torch.cat(gathered.chunk(self.ranks), -1)


def compute_on_local_shards(model: Any) -> bool:
    """Let the layers of a split model compute on plain tensors where no gradient is asked for.

    Return whether all of them do: experts, and layers that the ranks hold unequal parts of, stay as they are.
    """
    for name, layer in model.named_modules():
        if (local := _build_local_layer(model, name, layer)) is not None:
            vars(layer)["local"] = local  # no submodule: its weights are the layer's own
            layer.forward = MethodType(_FORWARDS[isinstance(layer, nn.Embedding), local.style.axis], layer)
    return all("local" in vars(layer) or not _is_split(layer) for layer in model.modules())


def _is_split(layer: nn.Module) -> bool:
    return any(map(is_sharded, layer.parameters(recurse=False)))


def _build_local_layer(model: Any, name: str, layer: nn.Module) -> LocalLayer | None:
    """Return the local form of a split layer, or None for any other."""
    kind = nn.Embedding if isinstance(layer, nn.Embedding) else nn.Linear
    style = (EMBEDDING_STYLES if kind is nn.Embedding else LINEAR_STYLES).get(find_style(model, name))
    if not isinstance(layer, kind) or style is None or not _is_split(layer):
        return None
    weight: Any = layer.weight
    mesh = weight.device_mesh
    if mesh.ndim != 1 or weight.shape[style.axis] % mesh.size():
        return None
    local = copy.copy(layer)
    vars(local).pop("forward", None)
    local._parameters = {
        key: parameter
        if parameter is None
        else nn.Parameter(cast(Any, parameter).to_local() if is_sharded(parameter) else parameter, requires_grad=False)
        for key, parameter in layer._parameters.items()
    }
    return LocalLayer(
        layer=local,
        style=style,
        group=mesh.get_group().group_name,
        ranks=mesh.size(),
        rank=mesh.get_local_rank(),
        with_gradients=layer.forward,
    )


def _forward_outputs(self: Any, features: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """Compute this rank's output features of a linear layer."""
    local: LocalLayer = self.local
    if torch.is_grad_enabled():
        return local.with_gradients(features)
    part = local.layer(features)
    return local.gather(part) if local.style.full_features else part


def _forward_inputs(self: Any, features: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """Read this rank's input features of a linear layer."""
    local: LocalLayer = self.local
    if torch.is_grad_enabled():
        return local.with_gradients(features)
    if local.style.full_features:
        features = features.chunk(local.ranks, -1)[local.rank]
    output = local.sum(nn.functional.linear(features, local.layer.weight))
    return output if local.layer.bias is None else output + local.layer.bias


def _forward_rows(self: Any, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows outputs"]:
    """Look up the rows of an embedding that this rank holds."""
    local: LocalLayer = self.local
    if torch.is_grad_enabled():
        return local.with_gradients(ids)
    held = len(local.layer.weight)
    row = ids - local.rank * held
    is_held = (row >= 0) & (row < held)
    return local.sum(local.layer(row.clamp(0, held - 1)) * is_held[..., None])


def _forward_columns(self: Any, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows outputs"]:
    """Look up the columns of an embedding that this rank holds."""
    local: LocalLayer = self.local
    return local.with_gradients(ids) if torch.is_grad_enabled() else local.gather(local.layer(ids))


_FORWARDS: dict[tuple[bool, int], Callable[..., Tensor]] = {  # by whether it is an embedding, and the axis
    (False, 0): _forward_outputs,
    (False, INPUT_AXIS): _forward_inputs,
    (True, 0): _forward_rows,
    (True, 1): _forward_columns,
}
