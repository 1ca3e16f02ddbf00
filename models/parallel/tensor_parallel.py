"""Tensor parallelism of a frozen model: its own `tp_plan`, carried out by layer classes passed in.

The plan gives some layers a style. It says along which axis their weight is cut into ranks, and
whether features enter and leave the layer whole or, between two cut layers, in parts:

    style                                 cut axis          enters    leaves
    colwise                               output            whole     a part
    colwise_gather_output (colwise_rep)   output            whole     whole
    rowwise                               input             a part    whole, summed over ranks
    rowwise_split_input (rowwise_rep)     input             whole     whole, summed over ranks
    embedding_rowwise                     vocabulary        whole     whole, summed over ranks
    embedding_colwise                     features          whole     whole

Attention works on the heads that its rank has. With more ranks than key-value heads, neighbours
hold the same one: `k_proj` and `v_proj` are repeated head by head before they are cut, so that
each rank has the head which its queries ask. 4 query heads, 2 key-value heads, 4 ranks:

    rank      0    1    2    3
    queries   q0   q1   q2   q3
    keys      k0   k0   k1   k1

The classes have the signatures of Neuron's NxD. Nothing here is differentiated through: a
cut target is frozen and runs without gradients.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from models.errors import UserError

UNCUT = ("replicate", "replicated_with_grad_allreduce")


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a layer is cut, and whether what enters and leaves it is whole."""

    axis: int  # of its weight
    whole: bool


OUT, IN = 0, 1
LINEAR = {
    "colwise": Style(axis=OUT, whole=False),
    "colwise_gather_output": Style(axis=OUT, whole=True),
    "colwise_rep": Style(axis=OUT, whole=True),
    "rowwise": Style(axis=IN, whole=False),
    "rowwise_split_input": Style(axis=IN, whole=True),
    "rowwise_rep": Style(axis=IN, whole=True),
}
EMBEDDING = {
    "embedding_rowwise": Style(axis=0, whole=True),
    "embedding_colwise": Style(axis=1, whole=True),
}


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The classes that compute a cut layer, and which part of it this process has."""

    ranks: int
    rank: int
    column: Callable[..., nn.Module]  # ColumnParallelLinear
    row: Callable[..., nn.Module]  # RowParallelLinear
    embedding: Callable[..., nn.Module]  # ParallelEmbedding

    def like(self, layer: Any, part: "Part") -> nn.Module:
        """The cut form of a layer, without weights."""
        style, weight = part.style, layer.weight
        place: dict[str, Any] = {"dtype": weight.dtype, "device": torch.device("meta")}
        with torch.device("meta"):  # some classes look at it alone, and others at the argument
            if isinstance(layer, nn.Embedding):
                across = style.axis == 1
                return self.embedding(*weight.shape, shard_across_embedding=across, **place)
            size_out, size_in = weight.shape
            bias = layer.bias is not None
            if style.axis == OUT:
                size_out *= part.repeats
                return self.column(size_in, size_out, bias=bias, gather_output=style.whole, **place)
            return self.row(
                size_in, size_out, bias=bias, input_is_parallel=not style.whole, **place
            )


@dataclass(frozen=True, kw_only=True)
class Part:
    """How the ranks share one layer."""

    style: Style
    repeats: int = 1  # ranks that hold the same key-value head

    def axis(self, parameter: str) -> int | None:
        """Along which a parameter is cut. Biases of whole features are added after all is whole."""
        if parameter == "weight":
            return self.style.axis
        return OUT if self.style == LINEAR["colwise"] else None

    def cut(self, parameter: str, full: Tensor, *, ranks: int, rank: int) -> Tensor:
        """This rank's share, in memory of its own."""
        axis = self.axis(parameter)
        if axis is None:
            return full.clone()
        size = full.shape[axis] * self.repeats // ranks  # with repeats, that is one head
        return full.narrow(axis, rank // self.repeats * size, size).clone()

    def join(self, parameter: str, shares: Sequence[Tensor]) -> Tensor:
        """The full parameter. Inverse of `cut`."""
        axis = self.axis(parameter)
        return shares[0] if axis is None else torch.cat([*shares[:: self.repeats]], axis)


def plan(model: Any, ranks: int, *, whole: Collection[str] = ()) -> dict[str, Part]:
    """Which layers of a model are cut, and how. Reads no weight: a model on `meta` will do.

    Layers named `whole` stay so, and so do embedding and head where the vocabulary does not divide.
    """
    styles = model._tp_plan
    if not model.config.get_text_config().base_model_tp_plan:
        raise _refusal(model, ranks, "a plan that says how its layers are cut", "none")
    parts = {}
    for name, layer in model.named_modules():
        style = styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or style in UNCUT or name in whole:
            continue
        known = {nn.Linear: LINEAR, nn.Embedding: EMBEDDING}.get(type(layer), {})
        if style not in known:
            if isinstance(layer, nn.Embedding):  # one that does more than look up
                continue
            kind = f"{name} ({type(layer).__name__}, {style})"
            raise _refusal(model, ranks, "layers that are linear or an embedding", kind)
        parts[name] = Part(style=known[style])
    for name, attention in model.named_modules():
        if hasattr(attention, "num_key_value_groups"):
            parts |= _of_heads(model, name, attention, parts, ranks)
    return _dividing(model, parts, ranks)


def _of_heads(
    model: Any, name: str, attention: Any, parts: Mapping[str, Part], ranks: int
) -> dict[str, Part]:
    """The projections to keys and values, where each rank has heads of its own."""
    keys, values = f"{name}.k_proj", f"{name}.v_proj"
    if keys not in parts or parts[keys].style.whole:
        return {}
    config, size = model.config.get_text_config(), attention.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % ranks:
        raise _refusal(model, ranks, f"a divisor of its {heads} attention heads")
    if kv_heads % ranks and ranks % kv_heads:
        raise _refusal(model, ranks, f"a divisor or a multiple of its {kv_heads} key-value heads")
    for inner, parameter in attention.named_parameters():
        owner = f"{name}.{inner.rpartition('.')[0]}"
        if owner not in parts and parameter.numel() != size:
            raise _refusal(model, ranks, "weights that are of one head", f"{name}.{inner}")
    part = Part(style=LINEAR["colwise"], repeats=max(1, ranks // kv_heads))
    return {keys: part, values: part}


def _dividing(model: Any, parts: Mapping[str, Part], ranks: int) -> dict[str, Part]:
    """Without embedding or head where they do not divide. Raises UserError for what else."""
    tables, kept = (model.get_input_embeddings(), model.get_output_embeddings()), {}
    for name, part in parts.items():
        layer = model.get_submodule(name)
        size = layer.weight.shape[part.style.axis] * part.repeats
        if size % ranks == 0:
            kept[name] = part
        elif layer not in tables:
            raise _refusal(model, ranks, f"a divisor of the {size} features of {name}")
    return kept


def _refusal(model: Any, ranks: int, rule: str, got: str = "") -> UserError:
    kind = model.config.get_text_config().model_type
    return UserError(
        f"parallel.tensor: a target of {kind} needs {rule}, got {got or ranks}; "
        + ("use parallel.tensor=1" if got else "choose another parallel.tensor")
    )


def parallelise(model: Any, layers: Layers, *, whole: Collection[str] = ()) -> dict[str, Part]:
    """Replace layers in place by cut ones that hold this rank's share. Returns how they are cut."""
    parts = plan(model, layers.ranks, whole=whole)
    for name, part in parts.items():
        layer = model.get_submodule(name)
        share = {
            key: part.cut(key, full, ranks=layers.ranks, rank=layers.rank)
            for key, full in layer.state_dict().items()
        }
        cut = layers.like(layer, part)
        cut.load_state_dict(share, assign=True)
        model.set_submodule(name, cut.train(layer.training).requires_grad_(False))
    _share_heads(model, parts, layers.ranks)
    return parts


def _share_heads(model: Any, parts: Mapping[str, Part], ranks: int) -> None:
    """Tell attention, and who makes a cache for it, how many heads are here."""
    config = model.config.get_text_config()
    for name, attention in model.named_modules():
        keys = parts.get(f"{name}.k_proj")
        if keys is not None and not keys.style.whole:
            model.key_value_heads = max(1, config.num_key_value_heads // ranks)
            heads = config.num_attention_heads // ranks
            attention.num_key_value_groups = heads // model.key_value_heads


def key_value_heads(model: Any) -> int:
    """How many this process has keys and values of."""
    return getattr(model, "key_value_heads", model.config.get_text_config().num_key_value_heads)


def cut(
    full: Mapping[str, Shaped[Tensor, "..."]], parts: Mapping[str, Part], *, ranks: int, rank: int
) -> dict[str, Shaped[Tensor, "..."]]:
    """One rank's share of a state dict."""
    share = {}
    for name, tensor in full.items():
        layer, _, parameter = name.rpartition(".")
        part = parts.get(layer)
        share[name] = (
            part.cut(parameter, tensor, ranks=ranks, rank=rank) if part else tensor.clone()
        )
    return share


def join(
    shares: Sequence[Mapping[str, Shaped[Tensor, "..."]]], parts: Mapping[str, Part]
) -> dict[str, Shaped[Tensor, "..."]]:
    """The full state dict of the shares of all ranks, in their order. Inverse of `cut`."""
    full = {}
    for name, tensor in shares[0].items():
        layer, _, parameter = name.rpartition(".")
        part = parts.get(layer)
        full[name] = part.join(parameter, [share[name] for share in shares]) if part else tensor
    return full
