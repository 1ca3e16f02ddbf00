"""The base of the EAGLE methods: one decoder layer that drafts from the target's features.

    position t:  a feature of position t, embedding of token t+1  ->  token t+2
    step i:      its own last output, embedding of token t+1+i    ->  token t+2+i

Axes: B rows, T tokens, H hidden.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from models.distill.config import LossConf
from models.distill.loss_weights import shift_left
from models.drafts.base import Batch, DraftState, Extras
from models.drafts.cached import CachedDraft, attend_cached, new_layer_state
from models.drafts.config.one_layer import OneLayerConf
from models.drafts.dropout import draw_kept_inputs
from models.drafts.feature import FeatureDraft, layer_config
from models.layers import DecoderLayer
from models.target.language_model import TargetOutput
from models.target.modeling import build_rotary
from models.target.target import Target
from models.unrolled_attention import attend_unrolled


class OneLayerDraft(CachedDraft, FeatureDraft):
    """The base of one-layer drafts; a method adds the layer, its inputs and the head."""

    def __init__(
        self, conf: OneLayerConf, config: LlamaConfig, target: Target, *,
        loss: LossConf | None = None, seed: int | None = None,
    ):  # fmt: skip
        super().__init__(conf, config, target, loss=loss, seed=seed)
        self.trained_depth = self.config.training_unroll
        self.max_depth = self.config.training_max_depth
        self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.rotary = build_rotary(config)

    @classmethod
    def engine_config(cls, conf: Any, target: Target, **overrides: Any) -> LlamaConfig:
        """Return the config of the layer as engines read it; a method passes `overrides`."""
        return layer_config(
            target,
            conf.architecture,
            intermediate_size=conf.intermediate_size,
            num_attention_heads=conf.heads,
            num_key_value_heads=conf.kv_heads,
            head_dim=conf.head_size,
            training_unroll=conf.ttt_steps,
            training_max_depth=conf.max_depth,
            **overrides,
        )

    @classmethod
    def default_keys(cls, target: Target) -> dict[str, Any]:  # noqa: ARG003
        """Return the keys of config.json that only this project writes, with their defaults."""
        conf_class = cls.conf_class
        return {
            "training_unroll": conf_class.ttt_steps,
            "training_max_depth": conf_class.max_depth,
        }

    @classmethod
    def fields_from_config(cls, config: Any) -> dict[str, Any]:
        """Return the options that `engine_config` wrote to config.json."""
        return {
            "max_depth": config.training_max_depth,
            "ttt_steps": config.training_unroll,
            "intermediate_size": config.intermediate_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_size": config.head_dim,
        }

    @property
    def layer(self) -> DecoderLayer:
        raise NotImplementedError

    def project_inputs(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        rope: tuple[Tensor, Tensor], kept: Bool[Tensor, "b t inputs"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the residual stream that enters the layer, and its queries, keys and values.

        `kept` are the inputs that dropout keeps, embedding and feature side by side.
        """
        raise NotImplementedError

    def finish(
        self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]
    ) -> Float[Tensor, "b t h"]:
        """Return the output of the layer, which the next step reads."""
        return self.layer.finish(stream, attended)

    # --- training ---------------------------------------------------------------------------

    def prepare_batch(
        self, batch: Batch, *, step: int, generators: list[np.random.Generator]  # noqa: ARG002
    ) -> Extras:  # fmt: skip
        """Return the inputs that dropout keeps, the same ones at all steps of a position."""
        if not self.conf.dropout:
            return {}
        shape = (batch.input_ids.shape[1], 2 * self.config.hidden_size)
        return {"kept": draw_kept_inputs(generators, shape, dropout=self.conf.dropout)}

    def unroll_steps(
        self, batch: Batch, hidden: Float[Tensor, "b t h"], *, backprop_through_outputs: bool,
        kept: Bool[Tensor, "b t inputs"] | None = None,
    ) -> list[Float[Tensor, "b t h"]]:  # fmt: skip
        """Return the layer's output at each of the steps that decoding performs.

        Each step reads the output of the step before. `backprop_through_outputs` lets gradients
        flow back through it; they always flow through the keys and values of earlier steps. `kept`
        are the inputs that dropout keeps.
        """
        embedded, mask = self.embed_tokens(batch.input_ids), batch.attention_mask()
        keys, values, outputs = [], [], []
        for i in range(self.trained_depth):
            stream, query, key, value = self.project_inputs(
                shift_left(embedded, 1 + i), hidden, self.rotary(hidden, batch.positions + i), kept
            )
            keys.append(key)
            values.append(value)
            attended = attend_unrolled(query, keys, values, mask)
            outputs.append(self.finish(stream, attended))
            hidden = outputs[-1] if backprop_through_outputs else outputs[-1].detach()
        return outputs

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> DraftState:
        """Return an empty cache, and room for the last output of each row."""
        return new_layer_state(self.config, self.embed_tokens.weight, batch, slots)

    def start(
        self, state: DraftState, input_ids: Int[Tensor, "b prompt"], *,
        lengths: Int[Tensor, " b"], first_token: Int[Tensor, " b"], target_output: TargetOutput,
    ) -> DraftState:  # fmt: skip
        """Run a pass over the prompts, and return the state after them.

        Position t pairs the feature of position t with the token at t+1.
        """
        last = torch.arange(input_ids.shape[1], device=input_ids.device) == (lengths - 1)[:, None]
        tokens = torch.where(last, first_token[:, None], shift_left(input_ids, 1))
        return self.start_cache(state, tokens, target_output, lengths)

    def forward_step(
        self, state: DraftState, tokens: Int[Tensor, "b t"], hidden: Float[Tensor, "b t h"], *,
        positions: Int[Tensor, "b t"], slots: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
    ) -> Float[Tensor, "b t h"]:  # fmt: skip
        """Run the layer over cached keys: write at `slots`, attend through `mask`."""
        stream, query, key, value = self.project_inputs(
            self.embed_tokens(tokens), hidden, self.rotary(hidden, positions)
        )
        attended = attend_cached(state, query, key, value, slots=slots, mask=mask)
        return self.finish(stream, attended)
