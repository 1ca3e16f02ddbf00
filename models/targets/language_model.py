"""Any Hugging Face causal LM with softmax attention, run with our masks, positions and cache.

The target is one, and so is a draft that is itself a language model. Captured layer i is the tensor
that enters layer i, which is Hugging Face's `hidden_states[i]` and vLLM's
`eagle_aux_hidden_state_layer_ids`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.device.device import Device
from models.device.graph_budget import graph_key_of
from models.losses.distributions import TopKLogits
from models.targets import architectures
from models.targets.cache import CacheWrite, StaticCache
from models.targets.modeling import HookedDecoder


@dataclass(kw_only=True)
class TargetOutput:
    """The outputs of a model at each position.

    If `topk` is set, losses use it instead of `hidden`, which is then an input of the draft, or
    zeros of width 1 that nothing reads: not every compiler takes tensors of size zero.
    """

    hidden: Float[Tensor, "batch seq hidden"]  # after the final norm: the head's input
    captured: Float[Tensor, "batch seq captured"] | None  # layers concatenated, low to high
    topk: TopKLogits | None = None  # None: the head computes the logits from `hidden`

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "TargetOutput":
        """Return a copy whose tensors are `change` of these."""
        return TargetOutput(
            hidden=change(self.hidden),
            captured=None if self.captured is None else change(self.captured),
            topk=self.topk and self.topk.map_tensors(change),
        )

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "TargetOutput":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def loss_inputs(self) -> Float[Tensor, "rows hidden"] | TopKLogits:
        """Return the hidden states or the top-k logits of all positions, the rows concatenated."""
        if self.topk is None:
            return self.hidden.flatten(0, 1)
        return self.topk.map_tensors(lambda t: t.flatten(0, 1))


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
        self.head_size = architectures.get_head_size(self.config)
        self.sliding_window = architectures.get_sliding_window(self.config)
        self._run_layers = HookedDecoder(model, device.compile_region)

    @property
    def graph_key(self) -> str:
        """Return what graphs depend on (see models/device/graph_budget.py)."""
        return graph_key_of(self.model)

    @property
    def kv_heads(self) -> int:
        """Return the number of key-value heads on this rank, which sharding the model changes."""
        return getattr(self.model, "key_value_heads", self.config.num_key_value_heads)

    @property
    def eos_ids(self) -> list[int]:
        """Return the ids that end an answer."""
        return architectures.as_id_list(self.model.generation_config.eos_token_id)

    def eager(self) -> Any:  # of the same class; the checker of the tests rejects `Self` here
        """Return a shallow copy that runs eagerly, for rounds too few to compile for."""
        model = copy.copy(self)
        model.device = self.device.eager()
        return model

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        return self.head(hidden)

    def new_cache(self, batch: int, slots: int) -> StaticCache:
        """Allocate a cache of `slots` tokens per row, tree nodes included."""
        shape, weight = (batch, self.kv_heads, slots, self.head_size), self.head.weight
        return StaticCache(self.num_layers, shape, dtype=weight.dtype, device=weight.device)

    def forward_hidden(
        self,
        input_ids: Int[Tensor, "batch seq"],
        *,
        positions: Int[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch 1 seq keys"],
        layers: list[int],
        cache: StaticCache | None = None,
        write: CacheWrite | None = None,
        recomputes: bool = False,
    ) -> TargetOutput:
        """Run one forward pass and return its outputs, with the inputs of the captured `layers`.

        With a cache, keys and values are written to the slots of `write`. If it `recomputes`, a layer runs again in
        the backward pass instead of keeping what that needs.
        """
        cache_write = None if cache is None or write is None else (cache, write)
        in_window = None
        if self.sliding_window is not None:
            # A window counts positions, not slots: siblings of a tree have slots of their own but share a position.
            # With a cache, the positions of the new tokens are recorded in it.
            keys = positions if cache is None or write is None else cache.record_positions(positions, write)
            in_window = (positions[:, :, None] - keys[:, None] < self.sliding_window)[:, None]
        masks = architectures.build_layer_masks(self.config, mask, in_window, self.head.weight.dtype)
        hidden, captured = self._run_layers(
            input_ids, positions=positions, masks=masks, layers=layers, cache_write=cache_write, recomputes=recomputes
        )
        return TargetOutput(hidden=hidden, captured=torch.cat(captured, -1) if captured else None)
