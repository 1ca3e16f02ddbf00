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
from models.parallel.tensor_parallel import (
    EMBEDDING_STYLES,
    EXPERTS,
    EXPERTS_STYLE,
    INPUT_AXIS,
    LINEAR_STYLES,
    ShardStyle,
    find_style,
)


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

    Return whether all of them do: layers that the ranks hold unequal parts of stay as they are.
    """
    for name, layer in model.named_modules():
        styles = EMBEDDING_STYLES if isinstance(layer, nn.Embedding) else LINEAR_STYLES
        style = styles.get(find_style(model._tp_plan, name))
        if not _is_split(layer):
            continue
        if find_style(model._ep_plan, name) == EXPERTS_STYLE:
            _replace_forward(layer, EXPERTS, _forward_experts)
        elif isinstance(layer, nn.Linear | nn.Embedding) and style is not None and _has_equal_parts(layer, style):
            _replace_forward(layer, style, _FORWARDS[isinstance(layer, nn.Embedding), style.axis])
    return all("local" in vars(layer) or not _is_split(layer) for layer in model.modules())


def _is_split(layer: nn.Module) -> bool:
    return any(map(is_sharded, layer.parameters(recurse=False)))


def _has_equal_parts(layer: Any, style: ShardStyle) -> bool:
    return layer.weight.shape[style.axis] % layer.weight.device_mesh.size() == 0


def _replace_forward(layer: Any, style: ShardStyle, forward: Callable[..., Tensor]) -> None:
    """Let a layer compute by `forward`, which finds this rank's weights in the layer's attribute `local`."""
    mesh = next(p.device_mesh for p in layer.parameters(recurse=False) if is_sharded(p))
    local = copy.copy(layer)
    vars(local).pop("forward", None)
    if isinstance(local, nn.Embedding):
        local.padding_idx = None  # of a gradient alone, and perhaps past this rank's rows
    local._parameters = {
        key: parameter
        if parameter is None
        else nn.Parameter(cast(Any, parameter).to_local() if is_sharded(parameter) else parameter, requires_grad=False)
        for key, parameter in layer._parameters.items()
    }
    # No submodule: its weights are the layer's own.
    vars(layer)["local"] = LocalLayer(
        layer=local,
        style=style,
        group=mesh.get_group().group_name,
        ranks=mesh.size(),
        rank=mesh.get_local_rank(),
        with_gradients=layer.forward,
    )
    layer.forward = MethodType(forward, layer)


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


def _forward_experts(
    self: Any,
    hidden_states: Float[Tensor, "tokens hidden"],
    top_k_index: Int[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens hidden"]:
    """Run the experts that this rank holds on the tokens that chose them."""
    local: LocalLayer = self.local
    if torch.is_grad_enabled():
        return local.with_gradients(hidden_states, top_k_index, top_k_weights)
    held = local.layer.num_experts
    is_held = top_k_index // held == local.rank
    # Experts skip the index past the last of theirs.
    index = torch.where(is_held, top_k_index % held, held)
    return local.sum(local.layer(hidden_states, index, top_k_weights * is_held)).to(hidden_states.dtype)


_FORWARDS: dict[tuple[bool, int], Callable[..., Tensor]] = {  # by whether it is an embedding, and the axis
    (False, 0): _forward_outputs,
    (False, INPUT_AXIS): _forward_inputs,
    (True, 0): _forward_rows,
    (True, 1): _forward_columns,
}
