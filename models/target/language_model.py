"""Any Hugging Face causal LM with softmax attention, run with our masks, positions and cache.

The target is one, and so is a draft that is itself a language model. Captured layer i is the tensor
that enters layer i, which is Hugging Face's `hidden_states[i]` and vLLM's
`eagle_aux_hidden_state_layer_ids`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.device.device import Device
from models.device.graph_budget import graph_key_of
from models.distill.topk_logits import TopKLogits
from models.parallel import tensor_parallel
from models.target import architectures
from models.target.cache import CacheWrite, LayerCache, StaticCache
from models.target.pretrained import as_id_list


@dataclass(kw_only=True)
class TargetOutput:
    """The outputs of a model at each position.

    If `topk` is set, losses use it instead of `hidden`, which is then an input or has width 0.
    """

    hidden: Float[Tensor, "batch seq hidden"]  # after the final norm: the head's input
    captured: Float[Tensor, "batch seq captured"]  # captured layers concatenated, low to high
    topk: TopKLogits | None = None  # None: the head computes the logits from `hidden`

    def to(self, device: torch.device) -> "TargetOutput":
        return TargetOutput(
            hidden=self.hidden.to(device),
            captured=self.captured.to(device),
            topk=self.topk and self.topk.map_tensors(lambda t: t.to(device)),
        )

    def loss_inputs(self) -> Float[Tensor, "rows hidden"] | TopKLogits:
        """Return the hidden states or the top-k logits of all positions, the rows concatenated."""
        if self.topk is None:
            return self.hidden.flatten(0, 1)
        return self.topk.map_tensors(lambda t: t.flatten(0, 1))


@dataclass(kw_only=True)
class _ForwardState:
    """The state of one forward pass, which copies of a target share, as they share the layers."""

    layer_inputs: dict[int, Tensor] = field(default_factory=dict)
    cache_write: tuple[StaticCache, CacheWrite] | None = None


@dataclass(kw_only=True)
class _LayerHook:
    """A layer's index and state, kept as its attribute so that a copied model has its own."""

    index: int
    forward_state: _ForwardState
    region: Callable


class LanguageModel:
    """A causal LM with three operations: forward_hidden, logits, new_cache."""

    def __init__(self, model: Any, *, device: Device):
        self.model, self.device = model, device
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.head_size: int = (
            getattr(self.config, "head_dim", None)
            or self.hidden_size // self.config.num_attention_heads
        )
        self.sliding_window = architectures.get_sliding_window(self.config)
        self._forward_state = _ForwardState()
        region = device.compile_region(_run_layer)
        for i, layer in enumerate(self.decoder.layers):
            layer.place = _LayerHook(index=i, forward_state=self._forward_state, region=region)
            # a method bound to the layer, so that a copy of the model runs its own layers
            layer.forward = MethodType(_hooked_forward, layer)

    @property
    def graph_key(self) -> str:
        """Return what graphs depend on (see models/device/graph_budget.py)."""
        return graph_key_of(self.model)

    @property
    def kv_heads(self) -> int:
        """Return the number of key-value heads on this rank, which sharding the model changes."""
        return tensor_parallel.count_kv_heads(self.model)

    @property
    def eos_ids(self) -> list[int]:
        """Return the ids that end an answer."""
        return as_id_list(self.model.generation_config.eos_token_id)

    def eager(self) -> Any:  # of the same class; the checker of the tests rejects `Self` here
        """Return a shallow copy that runs eagerly, for rounds too few to compile for."""
        model = copy.copy(self)
        model.device = self.device.eager()
        return model

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        return self.head(hidden)

    def new_cache(self, batch: int, slots: int) -> StaticCache:
        """Allocate a cache of `slots` tokens per row, tree nodes included."""
        return StaticCache(
            layers=self.num_layers,
            batch=batch,
            heads=self.kv_heads,
            slots=slots,
            head_size=self.head_size,
            dtype=self.head.weight.dtype,
            device=self.head.weight.device,
        )

    def forward_hidden(
        self,
        input_ids: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch 1 seq keys"],
        layers: list[int],
        cache: StaticCache | None = None,
        write: CacheWrite | None = None,
    ) -> TargetOutput:
        """Run one forward pass and return its outputs, with the inputs of the captured `layers`.

        With a cache, keys and values are written to the slots of `write`.
        """
        # A new dict: graphs must not depend on what an earlier pass left in it.
        self._forward_state.layer_inputs = {}
        if cache is not None:
            assert write is not None
            self._forward_state.cache_write = cache, write
        hidden = self.decoder(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=self._layer_masks(mask, positions, cache, write),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        captured = [self._forward_state.layer_inputs[i] for i in layers]
        # Otherwise a compiled graph would return every layer's input.
        self._forward_state.layer_inputs = {}
        self._forward_state.cache_write = None
        return TargetOutput(
            hidden=hidden, captured=torch.cat(captured, -1) if captured else hidden[..., :0]
        )

    def _layer_masks(
        self, mask: Bool[Tensor, "b 1 t s"], positions: Int[Tensor, "b t"],
        cache: StaticCache | None, write: CacheWrite | None,
    ) -> Any:  # fmt: skip
        """Build the attention masks of all layers.

        A window counts positions, not slots: siblings of a tree have slots of their own but share a
        position. With a cache, the positions of the new tokens are recorded in it.
        """
        in_window = None
        if self.sliding_window is not None:
            keys = (
                positions
                if cache is None or write is None
                else cache.record_positions(positions, write)
            )
            in_window = (positions[:, :, None] - keys[:, None] < self.sliding_window)[:, None]
        return architectures.build_layer_masks(self.config, mask, in_window, self.head.weight.dtype)


def _hooked_forward(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Run a layer: record the tensor that enters it, and pass it its part of the cache.

    The recorder of transformers cannot be traced: it keeps its results in a context variable.
    """
    hook: _LayerHook = layer.place
    hook.forward_state.layer_inputs[hook.index] = hidden_states
    cache_args = ()
    if hook.forward_state.cache_write is not None:
        cache, write = hook.forward_state.cache_write
        kwargs = kwargs | {"past_key_values": None}
        cache_args = cache.layer_args(hook.index, write)
    return hook.region(layer, hidden_states, cache_args, kwargs)


def _run_layer(
    layer: nn.Module, hidden_states: Tensor, cache_args: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one layer. As its inputs are only tensors and constants, it is traced once for all."""
    if cache_args:
        kwargs = kwargs | {"past_key_values": LayerCache(*cache_args)}
    return type(layer).forward(layer, hidden_states, **kwargs)
