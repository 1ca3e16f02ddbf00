"""One decoder layer that drafts from the target's features: what the EAGLE methods share.

    row t:   a feature of position t, embedding of token t+1   ->   token t+2
    step i:  the same row, fed its own output and the embedding of token t+1+i -> token t+2+i

Axes: B rows, T tokens, H hidden.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from models import checkpoint
from models.distill.loss_weights import sooner
from models.drafts.base import Batch, State
from models.drafts.cached import CachedDraft
from models.drafts.feature import FeatureConf, FeatureDraft, layer_config
from models.errors import UserError
from models.layers import attend, attend_unrolled
from models.target.cache import places, prompt_mask
from models.target.language_model import Seen
from models.target.target import Target


@dataclass(kw_only=True)
class OneLayerConf(FeatureConf):
    """What every such method leaves to choose; the rest follows from the target."""

    max_depth: int = 16  # tokens of the deepest proposal
    unroll: int = 7  # steps that it is trained on
    intermediate_size: int | None = None  # None = the target's
    heads: int | None = None  # None = the target's
    kv_heads: int | None = None  # None = the target's
    head_size: int | None = None  # None = the target's

    def __post_init__(self) -> None:
        for key in ("unroll", "max_depth"):
            if getattr(self, key) < 1:
                raise UserError(f"draft.{key}: must be at least 1, got {getattr(self, key)}")

    def layer(self, target: Target, **own: Any) -> LlamaConfig:
        """The layer as engines read it, with the keys that are the method's own."""
        return layer_config(
            target,
            self.architecture,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            training_unroll=self.unroll,
            training_max_depth=self.max_depth,
            **own,
        )

    @classmethod
    def read_layer(cls, directory: Path, **defaults: Any) -> LlamaConfig:
        """What `layer` wrote; drafts published elsewhere leave our keys, and `defaults`, out."""
        ours: dict[str, Any] = {"training_unroll": cls.unroll, "training_max_depth": cls.max_depth}
        return LlamaConfig(**(ours | defaults | checkpoint.read_config(directory)))

    @classmethod
    def choices(cls, draft: "OneLayerDraft") -> dict[str, Any]:
        """Those that a draft was built by."""
        return {
            "max_depth": draft.max_depth,
            "unroll": draft.trained_depth,
            "intermediate_size": draft.config.intermediate_size,
            "heads": draft.config.num_attention_heads,
            "kv_heads": draft.config.num_key_value_heads,
            "head_size": draft.config.head_dim,
        }


class OneLayerDraft(CachedDraft, FeatureDraft):
    """A method says what enters the layer and what reads its output; the rest is here."""

    embed_tokens: nn.Embedding
    rotary: nn.Module

    def enter(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        turn: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """The residual stream that enters the layer, and its queries, keys and values."""
        raise NotImplementedError

    def finish(
        self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]
    ) -> Float[Tensor, "b t h"]:
        """The rest of the layer: its output is the feature of the next step."""
        raise NotImplementedError

    # --- training ---------------------------------------------------------------------------

    def unroll(
        self, batch: Batch, hidden: Float[Tensor, "b t h"], *, carries: bool
    ) -> list[Float[Tensor, "b t h"]]:
        """The layer's output at each of the steps that decoding performs.

        `carries` lets gradients flow from a step into the steps that fed it.
        """
        embedded, mask = self.embed_tokens(batch.ids), batch.attends()
        keys, values, outputs = [], [], []
        for i in range(self.trained_depth):
            turn = self.rotary(hidden, batch.positions + i)
            stream, query, key, value = self.enter(sooner(embedded, 1 + i), hidden, turn)
            keys.append(key)
            values.append(value)
            outputs.append(self.finish(stream, attend_unrolled(query, keys, values, mask)))
            hidden = outputs[-1] if carries else outputs[-1].detach()
        return outputs

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> State:
        weight = self.embed_tokens.weight
        groups, size = self.config.num_key_value_heads, self.config.head_dim
        shape = (batch, groups, slots + 1, size)  # one more: the garbage slot
        return {
            "keys": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "values": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
            "hidden": weight.new_zeros(batch, self.config.hidden_size),
        }

    def start(
        self, state: State, ids: Int[Tensor, "b prompt"], *, lengths: Int[Tensor, " b"],
        first: Int[Tensor, " b"], seen: Seen,
    ) -> State:  # fmt: skip
        last = torch.arange(ids.shape[1], device=ids.device) == (lengths - 1)[:, None]
        tokens = torch.where(last, first[:, None], sooner(ids, 1))
        rows = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.read(
            state | {"lengths": torch.zeros_like(lengths)}, tokens, seen, rows=rows,
            mask=prompt_mask(lengths, ids.shape[1], self.slots(state)), count=lengths,
        )  # fmt: skip

    def slots(self, state: State) -> int:
        return state["keys"].shape[2]

    def step(
        self, state: State, tokens: Int[Tensor, "b t"], hidden: Float[Tensor, "b t h"], *,
        positions: Int[Tensor, "b t"], slots: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
    ) -> Float[Tensor, "b t h"]:  # fmt: skip
        """The layer over cached keys: writes at `slots`, reads through `mask`."""
        turn = self.rotary(hidden, positions)
        stream, query, key, value = self.enter(self.embed_tokens(tokens), hidden, turn)
        where = places(state["keys"], slots)
        state["keys"][where], state["values"][where] = key, value
        attended = attend(query, state["keys"], state["values"], mask)
        return self.finish(stream, attended)
