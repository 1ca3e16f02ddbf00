"""The base of the EAGLE methods: one decoder layer that drafts from the target's features.

    row t:   a feature of position t, embedding of token t+1   ->   token t+2
    step i:  the same row, with its own output and the embedding of token t+1+i -> token t+2+i

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
from models.distill.loss_weights import shift_left
from models.drafts.base import Batch, DraftState
from models.drafts.cached import CachedDraft
from models.drafts.feature import FeatureConf, FeatureDraft, layer_config
from models.errors import UserError
from models.layers import attend, attend_unrolled
from models.target.cache import prompt_mask, slot_index
from models.target.language_model import TargetOutput
from models.target.target import Target


@dataclass(kw_only=True)
class OneLayerConf(FeatureConf):
    """The options of all one-layer methods; everything else follows from the target."""

    max_depth: int = 16  # tokens of the deepest proposal
    unroll: int = 7  # drafting steps in training
    intermediate_size: int | None = None  # None = the target's
    heads: int | None = None  # None = the target's
    kv_heads: int | None = None  # None = the target's
    head_size: int | None = None  # None = the target's

    def __post_init__(self) -> None:
        for key in ("unroll", "max_depth"):
            if getattr(self, key) < 1:
                raise UserError(f"draft.{key}: must be at least 1, got {getattr(self, key)}")

    def build_layer_config(self, target: Target, **overrides: Any) -> LlamaConfig:
        """Build the config of the layer as engines read it; a method passes `overrides`."""
        return layer_config(
            target,
            self.architecture,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            training_unroll=self.unroll,
            training_max_depth=self.max_depth,
            **overrides,
        )

    @classmethod
    def read_layer_config(cls, directory: Path, **defaults: Any) -> LlamaConfig:
        """Read what `build_layer_config` wrote.

        Drafts published elsewhere lack our own keys and those of `defaults`.
        """
        training_fields: dict[str, Any] = {
            "training_unroll": cls.unroll,
            "training_max_depth": cls.max_depth,
        }
        return LlamaConfig(**(training_fields | defaults | checkpoint.read_config(directory)))

    @classmethod
    def fields_from_draft(cls, draft: "OneLayerDraft") -> dict[str, Any]:
        """Return the fields of the configuration that `draft` was built from."""
        return {
            "max_depth": draft.max_depth,
            "unroll": draft.trained_depth,
            "intermediate_size": draft.config.intermediate_size,
            "heads": draft.config.num_attention_heads,
            "kv_heads": draft.config.num_key_value_heads,
            "head_size": draft.config.head_dim,
        }


class OneLayerDraft(CachedDraft, FeatureDraft):
    """The base of one-layer drafts; a method adds the layer's inputs and the head."""

    embed_tokens: nn.Embedding
    rotary: nn.Module

    def project_inputs(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        rope: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the residual stream that enters the layer, and its queries, keys and values."""
        raise NotImplementedError

    def finish_layer(
        self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]
    ) -> Float[Tensor, "b t h"]:
        """Run the layer after its attention; the output is the feature of the next step."""
        raise NotImplementedError

    # --- training ---------------------------------------------------------------------------

    def unroll_steps(
        self, batch: Batch, hidden: Float[Tensor, "b t h"], *, carries_grad: bool
    ) -> list[Float[Tensor, "b t h"]]:
        """Return the layer's output at each of the steps that decoding performs.

        `carries_grad` lets gradients flow from a step into the steps before it.
        """
        embedded, mask = self.embed_tokens(batch.input_ids), batch.attention_mask()
        keys, values, outputs = [], [], []
        for i in range(self.trained_depth):
            rope = self.rotary(hidden, batch.positions + i)
            stream, query, key, value = self.project_inputs(
                shift_left(embedded, 1 + i), hidden, rope
            )
            keys.append(key)
            values.append(value)
            outputs.append(self.finish_layer(stream, attend_unrolled(query, keys, values, mask)))
            hidden = outputs[-1] if carries_grad else outputs[-1].detach()
        return outputs

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> DraftState:
        """Return an empty cache, and the last output of each row."""
        weight = self.embed_tokens.weight
        groups, size = self.config.num_key_value_heads, self.config.head_dim
        shape = (batch, groups, slots + 1, size)  # the last slot is the garbage slot
        return {
            "keys": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "values": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
            "hidden": weight.new_zeros(batch, self.config.hidden_size),
        }

    def start(
        self, state: DraftState, input_ids: Int[Tensor, "b prompt"], *,
        lengths: Int[Tensor, " b"], first_token: Int[Tensor, " b"], target_output: TargetOutput,
    ) -> DraftState:  # fmt: skip
        """Read the prompts: row t pairs the feature of position t with the token at t+1."""
        last = torch.arange(input_ids.shape[1], device=input_ids.device) == (lengths - 1)[:, None]
        tokens = torch.where(last, first_token[:, None], shift_left(input_ids, 1))
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.extend_state(
            state | {"lengths": torch.zeros_like(lengths)}, tokens, target_output,
            positions=positions,
            mask=prompt_mask(lengths, input_ids.shape[1], self.num_slots(state)), count=lengths,
        )  # fmt: skip

    def num_slots(self, state: DraftState) -> int:
        return state["keys"].shape[2]

    def forward_step(
        self, state: DraftState, tokens: Int[Tensor, "b t"], hidden: Float[Tensor, "b t h"], *,
        positions: Int[Tensor, "b t"], slots: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
    ) -> Float[Tensor, "b t h"]:  # fmt: skip
        """Run the layer over cached keys: write at `slots`, attend through `mask`."""
        rope = self.rotary(hidden, positions)
        stream, query, key, value = self.project_inputs(self.embed_tokens(tokens), hidden, rope)
        index = slot_index(state["keys"], slots)
        state["keys"][index], state["values"][index] = key, value
        attended = attend(query, state["keys"], state["values"], mask)
        return self.finish_layer(stream, attended)
