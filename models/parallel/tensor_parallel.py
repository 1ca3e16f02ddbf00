"""Tensor parallelism of a frozen target on the XLA route, and of its plan for every machine.

Elsewhere transformers splits the target itself, in models/targets/loading.py. Both follow the model's `tp_plan`, which
this module applies with the caller's layer classes; these have the signatures of Neuron's NxD. No gradients are
computed. See docs/nxd.md for the styles of a plan, and for the order of key-value heads that several ranks hold.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.io.errors import require

MIN_TORCH = "2.13"  # for DTensor and FSDP2; the rest runs on the lower bound of pyproject.toml
REPLICATED_STYLES = ("replicate", "replicated_with_grad_allreduce")


@dataclass(frozen=True, kw_only=True)
class ShardStyle:
    """The sharded axis of a layer, and whether its input and output features are full."""

    axis: int  # of the weight
    full_features: bool


OUTPUT_AXIS, INPUT_AXIS = 0, 1
LINEAR_STYLES = {
    "colwise": ShardStyle(axis=OUTPUT_AXIS, full_features=False),
    "colwise_gather_output": ShardStyle(axis=OUTPUT_AXIS, full_features=True),
    "colwise_rep": ShardStyle(axis=OUTPUT_AXIS, full_features=True),
    "rowwise": ShardStyle(axis=INPUT_AXIS, full_features=False),
    "rowwise_split_input": ShardStyle(axis=INPUT_AXIS, full_features=True),
    "rowwise_rep": ShardStyle(axis=INPUT_AXIS, full_features=True),
}
EMBEDDING_STYLES = {
    "embedding_rowwise": ShardStyle(axis=0, full_features=True),
    "embedding_colwise": ShardStyle(axis=1, full_features=True),
}
EXPERTS_PLAN_STYLE = "ep_dispatch_experts"  # of a model's other plan
EXPERTS_SHARD = ShardStyle(axis=0, full_features=True)  # whole experts on each rank


@dataclass(frozen=True, kw_only=True)
class ParallelLayers:
    """The classes of sharded layers, and the rank of this process."""

    ranks: int
    rank: int
    column: Callable[..., nn.Module]  # ColumnParallelLinear
    row: Callable[..., nn.Module]  # RowParallelLinear
    embedding: Callable[..., nn.Module]  # ParallelEmbedding

    def build_sharded(self, layer: Any, shard: "LayerShard") -> nn.Module:
        """Return the sharded form of a layer, without weights."""
        style, weight = shard.style, layer.weight
        options: dict[str, Any] = {"dtype": weight.dtype, "device": torch.device("meta")}
        with torch.device("meta"):  # some classes read this, and others the argument
            if isinstance(layer, nn.Embedding):
                return self.embedding(*weight.shape, shard_across_embedding=style.axis == 1, **options)
            size_out, size_in = weight.shape
            bias = layer.bias is not None
            if style.axis == OUTPUT_AXIS:
                size_out *= shard.repeats
                return self.column(size_in, size_out, bias=bias, gather_output=style.full_features, **options)
            return self.row(size_in, size_out, bias=bias, input_is_parallel=not style.full_features, **options)


@dataclass(frozen=True, kw_only=True)
class LayerShard:
    """The division of one layer among the ranks."""

    style: ShardStyle
    repeats: int = 1  # ranks that hold the same key-value head

    def axis_of(self, parameter: str) -> int | None:
        """Return the sharded axis of a parameter; biases of full features are not sharded."""
        if parameter == "weight" or self.style is EXPERTS_SHARD:
            return self.style.axis
        return OUTPUT_AXIS if self.style == LINEAR_STYLES["colwise"] else None

    def shard(self, parameter: str, full: Tensor, *, ranks: int, rank: int) -> Tensor:
        """Return a copy of this rank's share of a full parameter."""
        axis = self.axis_of(parameter)
        if axis is None:
            return full.clone()
        # If heads are repeated, a share is one head, and `repeats` neighbors have the same one.
        size = full.shape[axis] * self.repeats // ranks
        return full.narrow(axis, rank // self.repeats * size, size).clone()


def list_head_layers(model: Any) -> list[str]:
    """Return the names of the output head and of embeddings tied to it."""
    head = model.get_output_embeddings()
    return [name for name, layer in model.named_modules() if getattr(layer, "weight", None) is head.weight]


def list_whole_tables(model: Any, *, reads_head: bool) -> list[str]:
    """Return the names of the tables that the XLA route does not split: a tied head, or one whose weight a loss reads.

    The parts of tied tables would be two, and an embedding that scales its rows stays whole.
    """
    layers = list_head_layers(model)
    return layers if reads_head or len(layers) > 1 else []


def check_heads(tensor: int, config: Any, *, remedy: str) -> None:
    """Raise UserError if DTensor cannot split a model of this config."""
    for heads, kind in (
        (config.num_key_value_heads, "key-value heads"),
        (config.num_attention_heads, "attention heads"),
    ):
        require(
            heads % tensor == 0, f"parallel.tensor: must divide the target's {heads} {kind}, got {tensor}; {remedy}"
        )


def check_torch(*, splits_weights: bool) -> None:
    """Raise UserError if this PyTorch is too old to split weights."""
    # Splitting failed with torch 2.9; 2.10 to 2.12 are untested.
    require(  # .dev0 admits the pre-releases of containers, such as 2.13.0a0
        not splits_weights or torch.__version__ >= f"{MIN_TORCH}.dev0",
        f"parallel: must be replicated below torch {MIN_TORCH}, got torch {torch.__version__}; upgrade torch",
    )


def check_native_split(model: Any, tensor: int, *, remedy: str) -> None:
    """Raise UserError if the native route cannot split a model; it deals experts, whole ones, to the processes."""
    check_torch(splits_weights=True)
    check_heads(tensor, model.config.get_text_config(), remedy=remedy)
    plan_shards(model, tensor, is_native=True)


def has_expert_plan(config: Any) -> bool:
    """Return whether a model's experts are divided among processes by a plan of its own."""
    return bool(getattr(config.get_text_config(), "base_model_ep_plan", None))


def find_style(plan: Mapping[str, str], name: str) -> str:
    """Return the style by which a model's plan divides a layer."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "replicate")


def plan_shards(
    model: Any, ranks: int, *, replicated: Collection[str] = (), is_native: bool = False
) -> dict[str, LayerShard]:
    """Return by name how each sharded layer of a model is divided. The model may be on `meta`.

    Layers named in `replicated` stay full, as do embedding and head if `ranks` does not divide
    them. If it `is_native`, transformers shards the model, experts and embeddings that scale their rows, too. Raise
    UserError for a model or layer that cannot be sharded.
    """
    base_plan = model.config.get_text_config().base_model_tp_plan or {}
    has_plan = any(name.startswith("layers.") for name in base_plan)  # not of embeddings alone
    has_plan |= is_native and has_expert_plan(model.config)
    _check_support(model, ranks, has_plan, "a tensor-parallel plan for its layers", "none")
    shards = {}
    for name, layer in model.named_modules():
        style = find_style(model._tp_plan, name)
        allowed = {nn.Linear: LINEAR_STYLES, nn.Embedding: EMBEDDING_STYLES}.get(type(layer), {})
        if is_native and isinstance(layer, nn.Embedding):
            allowed = EMBEDDING_STYLES
        if is_native and find_style(model._ep_plan, name) == EXPERTS_PLAN_STYLE:
            shards[name] = LayerShard(style=EXPERTS_SHARD)
            continue
        if style in REPLICATED_STYLES or name in replicated:
            continue
        if style in allowed:
            shards[name] = LayerShard(style=allowed[style])
        else:  # a subclass of an embedding, which does more than look up rows, stays full
            rule, got = "layers that are linear or an embedding", f"{name} ({type(layer).__name__}, {style})"
            _check_support(model, ranks, isinstance(layer, nn.Embedding), rule, got)
    for name, attention in model.named_modules():
        if hasattr(attention, "num_key_value_groups"):
            shards |= _plan_kv_heads(model, name, attention, shards, ranks)
    return _drop_indivisible(model, shards, ranks)


def _plan_kv_heads(
    model: Any, name: str, attention: Any, shards: Mapping[str, LayerShard], ranks: int
) -> dict[str, LayerShard]:
    """Return the plan of the projections to keys and values, whose heads are divided or repeated.

    Raise UserError if the number of ranks does not fit the heads.
    """
    keys, values = f"{name}.k_proj", f"{name}.v_proj"
    if keys not in shards or shards[keys].style.full_features:
        return {}
    config, size = model.config.get_text_config(), attention.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    _check_support(model, ranks, heads % ranks == 0, f"a divisor of its {heads} attention heads")
    divides = kv_heads % ranks == 0 or ranks % kv_heads == 0
    _check_support(model, ranks, divides, f"a divisor or a multiple of its {kv_heads} key-value heads")
    for inner, parameter in attention.named_parameters():
        fits = f"{name}.{inner.rpartition('.')[0]}" in shards or parameter.numel() == size
        _check_support(model, ranks, fits, "weights of a single head", f"{name}.{inner}")
    shard = LayerShard(style=LINEAR_STYLES["colwise"], repeats=max(1, ranks // kv_heads))
    return {keys: shard, values: shard}


def _drop_indivisible(model: Any, shards: Mapping[str, LayerShard], ranks: int) -> dict[str, LayerShard]:
    """Return `shards` without embedding and head if these are indivisible by `ranks`.

    Raise UserError for other layers that are indivisible.
    """
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    sizes = {
        name: next(model.get_submodule(name).parameters()).shape[shard.style.axis] * shard.repeats
        for name, shard in shards.items()
    }
    for name, size in sizes.items():
        fits = size % ranks == 0 or model.get_submodule(name) in tables
        _check_support(model, ranks, fits, f"a divisor of the {size} parts of {name}")
    return {name: shard for name, shard in shards.items() if sizes[name] % ranks == 0}


def _check_support(model: Any, ranks: int, holds: Any, rule: str, got: str = "") -> None:
    """Raise UserError unless the model has what tensor parallelism needs."""
    kind = model.config.get_text_config().model_type
    remedy = "use parallel.tensor=1" if got else "choose another parallel.tensor"
    require(bool(holds), f"parallel.tensor: a target of {kind} needs {rule}, got {got or ranks}; {remedy}")


def parallelize_model(
    model: Any, layers: ParallelLayers, *, replicated: Collection[str] = (), is_native: bool = False
) -> None:
    """Replace layers in place by sharded ones with this rank's share, and set the numbers of its heads."""
    shards = plan_shards(model, layers.ranks, replicated=replicated, is_native=is_native)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embeddings.weight is head.weight
    for name, shard in shards.items():
        layer = model.get_submodule(name)
        share = {
            key: shard.shard(key, full, ranks=layers.ranks, rank=layers.rank)
            for key, full in layer.state_dict().items()
        }
        sharded = layers.build_sharded(layer, shard)
        sharded.load_state_dict(share, assign=True)
        model.set_submodule(name, sharded.train(layer.training).requires_grad_(False))
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if is_tied and embeddings.weight.shape == head.weight.shape:
        head.weight = embeddings.weight
    # The cache reads the number of key-value heads from the model, an attention that of its groups.
    config = model.config.get_text_config()
    for name, attention in model.named_modules():
        keys = shards.get(f"{name}.k_proj")
        if keys is not None and not keys.style.full_features:
            model.key_value_heads = max(1, config.num_key_value_heads // layers.ranks)
            attention.num_key_value_groups = config.num_attention_heads // layers.ranks // model.key_value_heads
