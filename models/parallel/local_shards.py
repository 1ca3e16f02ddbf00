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
    EXPERTS_PLAN_STYLE,
    EXPERTS_SHARD,
    INPUT_AXIS,
    LINEAR_STYLES,
    OUTPUT_AXIS,
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
    compute: Callable[..., Tensor]  # takes this and the layer's arguments
    compute_with_gradients: Callable[..., Tensor]  # the forward of transformers; takes the layer's arguments

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
        if find_style(model._ep_plan, name) == EXPERTS_PLAN_STYLE:
            _replace_forward(layer, EXPERTS_SHARD, run_experts)
        elif isinstance(layer, nn.Linear | nn.Embedding) and style is not None and _has_equal_parts(layer, style):
            compute = COMPUTE.get((isinstance(layer, nn.Embedding), style.axis))
            if compute is not None:
                _replace_forward(layer, style, compute)
    return all("local" in vars(layer) or not _is_split(layer) for layer in model.modules())


def _is_split(layer: nn.Module) -> bool:
    return any(map(is_sharded, layer.parameters(recurse=False)))


def _has_equal_parts(layer: Any, style: ShardStyle) -> bool:
    return layer.weight.shape[style.axis] % layer.weight.device_mesh.size() == 0


def _replace_forward(layer: Any, style: ShardStyle, compute: Callable[..., Tensor]) -> None:
    """Let a layer compute on this rank's part of its weights where no gradient is asked for."""
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
        compute=compute,
        compute_with_gradients=layer.forward,
    )
    layer.forward = MethodType(_forward_local, layer)


def _forward_local(self: Any, *args: Tensor) -> Tensor:
    local: LocalLayer = self.local
    return local.compute_with_gradients(*args) if torch.is_grad_enabled() else local.compute(local, *args)


def compute_outputs(local: LocalLayer, features: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """Compute this rank's output features of a linear layer."""
    part = local.layer(features)
    return local.gather(part) if local.style.full_features else part


def read_inputs(local: LocalLayer, features: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """Read this rank's input features of a linear layer."""
    if local.style.full_features:
        features = features.chunk(local.ranks, -1)[local.rank]
    output = local.sum(nn.functional.linear(features, local.layer.weight))
    return output if local.layer.bias is None else output + local.layer.bias


def look_up_rows(local: LocalLayer, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows outputs"]:
    """Look up the rows of an embedding that this rank holds."""
    held = len(local.layer.weight)
    row = ids - local.rank * held
    is_held = (row >= 0) & (row < held)
    return local.sum(local.layer(row.clamp(0, held - 1)) * is_held[..., None])


def run_experts(
    local: LocalLayer,
    hidden_states: Float[Tensor, "tokens hidden"],
    top_k_index: Int[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens hidden"]:
    """Run the experts that this rank holds on the tokens that chose them."""
    held = local.layer.num_experts
    is_held = top_k_index // held == local.rank
    # Experts skip the index past the last of theirs.
    index = torch.where(is_held, top_k_index % held, held)
    return local.sum(local.layer(hidden_states, index, top_k_weights * is_held)).to(hidden_states.dtype)


COMPUTE: dict[tuple[bool, int], Callable[..., Tensor]] = {  # by whether a layer is an embedding, and the split axis
    (False, OUTPUT_AXIS): compute_outputs,
    (False, INPUT_AXIS): read_inputs,
    (True, OUTPUT_AXIS): look_up_rows,
}
