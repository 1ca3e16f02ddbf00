"""Passes of a split model without gradients, on plain tensors.

transformers splits weights into DTensors, whose dispatch takes longer than a small pass does, and which PyTorch cannot
trace inside a repeated region. Here each layer multiplies by this rank's part of its weights, as a plain tensor, and
joins what the ranks computed by collectives that graphs may contain. Passes with gradients stay those of transformers.

All ranks give a layer the same rows, but for embeddings and head in `own_rows`: there each rank gives its own, all of
them multiply the rows of all by their parts, and each gets back what belongs to its own rows.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.io.errors import UserError
from models.parallel.dtensor import is_sharded, local_part
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

_has_own_rows = False


@contextmanager
def own_rows(is_active: bool = True) -> Iterator[None]:
    """Let each rank give embeddings and head rows of its own in the block, all of one shape; collective."""
    global _has_own_rows  # graphs guard on it
    before, _has_own_rows = _has_own_rows, is_active
    try:
        yield
    finally:
        _has_own_rows = before


@dataclass(frozen=True, kw_only=True)
class LocalLayer:
    """A layer with this rank's part of its weights, and how the parts of the output are joined."""

    layer: Any  # a copy, whose parameters are plain
    style: ShardStyle
    size: int  # of the split axis, all ranks together
    group: Any  # name of the process group
    ranks: int
    rank: int
    compute: Callable[..., Tensor]  # takes this and the layer's arguments
    compute_with_gradients: Callable[..., Tensor]  # the forward of transformers; takes the layer's arguments

    @property
    def part_size(self) -> int:
        """Return the size of each rank's part; the last ranks may hold less."""
        return math.ceil(self.size / self.ranks)

    def share(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, where these differ."""
        return collectives.all_gather_single(rows.contiguous(), 0, self.group) if _has_own_rows else rows

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over the ranks, of this rank's own rows where they differ."""
        if _has_own_rows:
            return collectives.reduce_scatter_single(part, "sum", 0, self.group)
        return collectives.all_reduce(part, "sum", self.group)

    def join(self, part: Float[Tensor, "*rows part"]) -> Float[Tensor, "*rows features"]:
        """Return the features of all ranks, of this rank's own rows where they differ."""
        part = part.contiguous()
        if self.part_size * self.ranks > self.size:
            part = nn.functional.pad(part, (0, self.part_size - part.shape[-1]))
        if _has_own_rows:
            joined = collectives.all_to_all_single(part, None, None, self.group)
        else:
            joined = collectives.all_gather_single(part, 0, self.group)
        return torch.cat(joined.chunk(self.ranks), -1)[..., : self.size]


def compute_on_local_shards(model: Any) -> None:
    """Let the layers of a split model compute on plain tensors where no gradient is asked for.

    Raise UserError for a layer that is split in an unknown way.
    """
    for name, layer in model.named_modules():
        if not any(map(is_sharded, layer.parameters(recurse=False))):
            continue
        if find_style(model._ep_plan, name) == EXPERTS_PLAN_STYLE:
            _replace_forward(layer, EXPERTS_SHARD, run_experts)
            continue
        is_embedding, plan_style = isinstance(layer, nn.Embedding), find_style(model._tp_plan, name)
        style = (EMBEDDING_STYLES if is_embedding else LINEAR_STYLES).get(plan_style)
        compute = style and COMPUTE.get((is_embedding, style.axis))
        if style is None or compute is None:
            raise UserError(
                f"parallel.tensor: a target needs layers that are split in a known way, got {plan_style} for {name}; "
                "use parallel.tensor=1"
            )
        _replace_forward(layer, style, compute)


def _replace_forward(layer: Any, style: ShardStyle, compute: Callable[..., Tensor]) -> None:
    """Let a layer compute on this rank's part of its weights where no gradient is asked for."""
    split = next(p for p in layer.parameters(recurse=False) if is_sharded(p))
    mesh = cast(Any, split).device_mesh
    local = copy.copy(layer)
    vars(local).pop("forward", None)
    if isinstance(local, nn.Embedding):
        local.padding_idx = None  # of a gradient alone, and perhaps past this rank's rows
    local._parameters = {
        key: parameter if parameter is None else nn.Parameter(local_part(parameter), requires_grad=False)
        for key, parameter in layer._parameters.items()
    }
    # No submodule: its weights are the layer's own.
    vars(layer)["local"] = LocalLayer(
        layer=local,
        style=style,
        size=split.shape[style.axis],
        group=mesh.get_group().group_name,
        ranks=mesh.size(),
        rank=mesh.get_local_rank(),
        compute=compute,
        compute_with_gradients=layer.forward,
    )
    layer.forward = MethodType(_forward_local, layer)


def _forward_local(self: Any, *args: Tensor) -> Tensor:
    local: LocalLayer = self.local
    if torch.is_grad_enabled() and not _has_own_rows:
        return local.compute_with_gradients(*args)
    return local.compute(local, *args)


def compute_outputs(local: LocalLayer, features: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """Compute this rank's output features of a linear layer."""
    if not local.style.full_features:
        return local.layer(features)
    return local.join(local.layer(local.share(features)))


def read_inputs(local: LocalLayer, features: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """Read this rank's input features of a linear layer."""
    if local.style.full_features:
        features = features.chunk(local.ranks, -1)[local.rank]
    output = local.sum(nn.functional.linear(features, local.layer.weight))
    return output if local.layer.bias is None else output + local.layer.bias


def look_up_rows(local: LocalLayer, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows outputs"]:
    """Look up the rows of an embedding that this rank holds."""
    held = len(local.layer.weight)
    row = local.share(ids) - local.rank * local.part_size
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
