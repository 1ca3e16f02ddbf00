"""EAGLE: one decoder layer that drafts from the target's features; EAGLE-3 is in eagle3.py.

    position t:  a feature of position t, embedding of token t+1  ->  token t+2
    step i:      its own last output, embedding of token t+1+i    ->  token t+2+i

EAGLE-1 (https://arxiv.org/abs/2401.15077) predicts the target's next feature:

    position t:  fc(embedding of token t+1, H_t)  ->  decoder layer  ->  H_{t+1}  ->  token t+2

H_t is the target's last hidden state after its final norm. `ttt_steps` above 1 is HASS
(https://arxiv.org/abs/2408.15766), a dynamic tree EAGLE-2; see docs/eagle3.md.

Axes: B rows, T tokens, H hidden.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from models.batch import Batch
from models.drafts.base import DraftState, Extras, LossTerms
from models.drafts.bases.cached import CachedDecoding, CachePass, attend_cached, new_layer_state
from models.drafts.bases.feature import FeatureDraft
from models.drafts.options import Eagle1Conf, EagleConf
from models.layers import DecoderLayer, draw_dropout, drop_inputs, init_normal
from models.losses.loss_weights import position_weights, shift_left
from models.parallel.dtensor import full_tensor
from models.targets.language_model import TargetOutput
from models.targets.modeling import build_rotary, is_plain_lookup, recompute_in_backward
from models.targets.target import Target
from models.unrolled_attention import attend_unrolled

EMBEDDINGS = "embed_tokens.weight"  # their name in a checkpoint
NOISE_REFERENCE_LENGTH = 512  # tokens of a document whose noise is `feature_noise` wide


class EagleDraft(CachedDecoding, FeatureDraft):
    """The base of the EAGLE drafts; a method adds the layer, its inputs and the head."""

    config_keys: ClassVar[dict[str, str]] = {
        "max_depth": "training_max_depth",
        "ttt_steps": "training_unroll",
        "intermediate_size": "intermediate_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_size": "head_dim",
    }
    fc: nn.Linear  # merges embedding and feature into one input (EAGLE-1), or captured layers into a feature (EAGLE-3)
    backprop_through_outputs: ClassVar[bool]  # whether gradients flow back through the features

    def __init__(self, conf: EagleConf, config: LlamaConfig, target: Target):
        super().__init__(conf, config, target)
        self.trained_depth = conf.ttt_steps
        # Embeddings of its own, if they are trained or other than the target's.
        self.embed_tokens: nn.Embedding | None = None
        if conf.train_embeddings or not is_plain_lookup(self.target_embeddings):
            self._add_embeddings()
        self.rotary = build_rotary(config)

    @classmethod
    def default_keys(cls, target: Target) -> dict[str, Any]:
        """Return the keys of config.json that only this project writes, with their defaults."""
        return {cls.config_keys[option]: getattr(cls.conf_class, option) for option in ("ttt_steps", "max_depth")}

    @property
    def layer(self) -> DecoderLayer:
        raise NotImplementedError

    @property
    def graph_kind(self) -> str:
        return self.method if self.embed_tokens is None else f"{self.method}_with_embeddings"

    # --- the embeddings ----------------------------------------------------------------------

    def _add_embeddings(self) -> None:
        # Without random numbers, of which the other weights would take others then.
        table = torch.empty(self.config.vocab_size, self.config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=not self.conf.train_embeddings)

    def embed(self, input_ids: Int[Tensor, "b t"]) -> Float[Tensor, "b t h"]:
        """Return the embeddings of tokens in the dtype of the layer."""
        embeddings = self.target_embeddings if self.embed_tokens is None else self.embed_tokens
        return embeddings(input_ids).to(self.fc.weight.dtype)

    def copy_target_weights(self, target: Target, kept_ids: Int[Tensor, " draft_vocab"] | None = None) -> None:
        """Copy the target's embeddings, if the draft has its own."""
        if self.embed_tokens is not None:
            self.embed_tokens.load_state_dict({"weight": full_tensor(self.target_embeddings.weight)})

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return all tensors; as engines read embeddings from a draft's checkpoint, the target's are among them."""
        tensors = super().checkpoint_tensors()
        return tensors if EMBEDDINGS in tensors else tensors | {EMBEDDINGS: full_tensor(self.target_embeddings.weight)}

    def list_saved_weights(self) -> list[Tensor]:
        weights = super().list_saved_weights()
        return weights if self.embed_tokens is not None else [*weights, self.target_embeddings.weight]

    def take_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the weights from a checkpoint; embeddings that differ from the target's become the draft's own."""
        if self.embed_tokens is None:
            table = full_tensor(self.target_embeddings.weight).cpu()
            stored = tensors[EMBEDDINGS]  # either may be a rounded copy of the other
            if not any(torch.equal(stored.to(dtype), table.to(dtype)) for dtype in (stored.dtype, table.dtype)):
                self._add_embeddings()
        super().take_tensors(tensors)

    # --- the layer ---------------------------------------------------------------------------

    def merge_inputs(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"], dropout_mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b t width"]]:
        """Return the residual stream that enters the layer, and what its attention projects.

        `dropout_mask` has the inputs that dropout keeps, embedding and feature side by side.
        """
        raise NotImplementedError

    def finish(self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]) -> Float[Tensor, "b t h"]:
        """Return the output of the layer, which the next step reads."""
        return self.layer.finish(stream, attended)

    # --- training ---------------------------------------------------------------------------

    def prepare_batch(self, batch: Batch, *, step: int, generators: list[np.random.Generator]) -> Extras:
        """Return the inputs that dropout keeps, the same ones at all steps of a position."""
        shape = (batch.input_ids.shape[1], 2 * self.config.hidden_size)
        return draw_dropout(generators, shape, dropout=self.conf.dropout)

    def unroll_steps(
        self, batch: Batch, hidden: Float[Tensor, "b t h"], dropout_mask: Bool[Tensor, "b t inputs"] | None = None
    ) -> list[Float[Tensor, "b t h"]]:
        """Return the layer's output at each of the steps that decoding performs.

        Each step reads the output of the step before, and the keys and values of all earlier
        steps, through which gradients always flow.
        """
        embedded, mask = self.embed(batch.input_ids), batch.attention_mask()
        keys, values, outputs = [], [], []

        def run_step(hidden: Tensor, step: int, *earlier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return the output, keys and values of a step, given the keys and values of those before it."""
            stream, inputs = self.merge_inputs(shift_left(embedded, 1 + step), hidden, dropout_mask)
            rotary = self.rotary(hidden, batch.positions + step)
            query, key, value = self.layer.self_attn.project_qkv(inputs, rotary)
            attended = attend_unrolled(query, [*earlier[:step], key], [*earlier[step:], value], mask)
            return self.finish(stream, attended), key, value

        run = partial(recompute_in_backward, run_step) if self.recomputes else run_step
        for i in range(self.trained_depth):
            output, key, value = run(hidden, i, *keys, *values)
            keys.append(key)
            values.append(value)
            outputs.append(output)
            hidden = output if self.backprop_through_outputs else output.detach()
        return outputs

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> DraftState:
        return new_layer_state(self.config, self.fc.weight, batch, slots)

    def forward_step(
        self, state: DraftState, tokens: Int[Tensor, "b t"], hidden: Float[Tensor, "b t h"], cache_pass: CachePass
    ) -> Float[Tensor, "b t h"]:
        stream, inputs = self.merge_inputs(self.embed(tokens), hidden)
        query, key, value = self.layer.self_attn.project_qkv(inputs, self.rotary(hidden, cache_pass.positions))
        return self.finish(stream, attend_cached(state, query, key, value, cache_pass=cache_pass))


class Eagle1Draft(EagleDraft):
    """A decoder layer; the head is the target's."""

    conf_class = Eagle1Conf
    backprop_through_outputs = False
    reads_target_head = True

    def __init__(self, conf: Eagle1Conf, config: LlamaConfig, target: Target):
        super().__init__(conf, config, target)
        # There is no bias, unlike in the authors' code, because vLLM's loader supports none.
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        init_normal(self.fc, self.layers)

    @property
    def layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])

    def target_features(self, target_output: TargetOutput) -> Float[Tensor, "b t h"]:
        return target_output.hidden.to(self.fc.weight.dtype)

    def merge_inputs(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"], dropout_mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b t h"]]:
        inputs = torch.cat([embedded, hidden], -1)
        stream = self.fc(drop_inputs(inputs, dropout_mask, dropout=self.conf.dropout))
        return stream, stream

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t vocab"]:
        return self.head(hidden.to(self.head.weight.dtype))

    def prepare_batch(self, batch: Batch, *, step: int, generators: list[np.random.Generator]) -> Extras:
        """Return uniform noise for the features, which are not exact when the draft unrolls.

        A longer document gets less noise, in inverse proportion to its length in the row
        (SafeAILab/EAGLE, eagle/train/main.py, `AddUniformNoise`).
        """
        extras = super().prepare_batch(batch, step=step, generators=generators)
        if not self.conf.feature_noise:
            return extras
        shape = (batch.input_ids.shape[1], self.config.hidden_size)
        uniform = [generator.random(shape, dtype=np.float32) for generator in generators]
        ids = batch.document_ids
        lengths = (ids[:, :, None] == ids[:, None, :]).sum(-1)  # of each position's document
        width = self.conf.feature_noise * NOISE_REFERENCE_LENGTH / lengths[:, :, None]
        return extras | {"noise": width * (torch.from_numpy(np.stack(uniform)) - 0.5)}

    def loss_terms(
        self,
        batch: Batch,
        target_output: TargetOutput,
        noise: Float[Tensor, "b t h"] | None = None,
        dropout_mask: Bool[Tensor, "b t inputs"] | None = None,
    ) -> LossTerms:
        """Return the weighted sum of the feature loss (smooth L1) and the token distillation loss.

        `noise` is added to the features that the draft reads, not to those that it predicts.
        """
        features = self.target_features(target_output)
        outputs = self.unroll_steps(batch, features if noise is None else features + noise, dropout_mask)
        head = full_tensor(self.head.weight)
        # In evaluations no autocast brings fp32 outputs to the dtype of the target's head.
        head_inputs = [output.to(head.dtype) for output in outputs]
        terms = self.distill(head_inputs, batch, target_output, heads=[head], scale=self.conf.token_loss_weight)
        weights, _ = position_weights(batch, steps=self.trained_depth, conf=self.loss_conf)
        targets = [shift_left(features, 1 + i) for i in range(self.trained_depth)]
        errors = F.smooth_l1_loss(torch.stack(outputs), torch.stack(targets), reduction="none")
        distance = errors.float().mean(-1)
        is_counted = (weights != 0).flatten(1)
        # (sum, count) of each step
        pairs = torch.stack([(distance.flatten(1) * is_counted).sum(-1), is_counted.sum(-1)], -1)
        metrics = {f"distance_{i + 1}": pair.detach() for i, pair in enumerate(pairs)}
        distance_sum = (distance * weights).sum()
        return replace(terms, total=self.conf.feature_loss_weight * distance_sum, metrics=metrics)
