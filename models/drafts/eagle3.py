"""EAGLE-3 (https://arxiv.org/abs/2503.01840): one layer that drafts from the target's features.

    position t:  fc(low, mid, high captured at t), embedding of token t+1  ->  token t+2
    step i:      its own last output, embedding of token t+1+i             ->  token t+2+i

`loss_terms` unrolls the steps that decoding performs: it calls `unroll_steps` (eagle.py), then `distill`
(bases/feature.py). Decoding is that of bases/cached.py. See docs/eagle3.md.

Axes: B rows, T tokens, H hidden.
"""

from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from models.batch import Batch
from models.drafts.base import LossTerms, Needs
from models.drafts.eagle import EagleDraft
from models.drafts.options import Eagle3Conf
from models.io.errors import require
from models.layers import Eagle3Layer, RMSNorm, drop_inputs, init_normal
from models.parallel.dtensor import copy_full, full_tensor
from models.targets.language_model import TargetOutput
from models.targets.target import Target

NORM_SWITCHES = ("norm_before_residual", "norm_before_fc", "norm_output")  # keys of config.json


class Eagle3Draft(EagleDraft):
    """A decoder layer with its head and its draft vocabulary."""

    conf_class = Eagle3Conf
    config_keys: ClassVar[dict[str, str]] = EagleDraft.config_keys | {
        "layers": "eagle_aux_hidden_state_layer_ids",
        "vocab_size": "draft_vocab_size",
        **{name: name for name in NORM_SWITCHES},
    }
    backprop_through_outputs = True
    # Draft id i stands for target id i + d2t[i]. Engines read both maps.
    d2t: Int[Tensor, " draft_vocab"]
    t2d: Bool[Tensor, " vocab"]  # whether a target id has a draft id

    def __init__(self, conf: Eagle3Conf, config: LlamaConfig, target: Target):
        super().__init__(conf, config, target)
        layers = list(self.config.eagle_aux_hidden_state_layer_ids)
        self.needs = Needs(layers=layers, hidden=False, context=True)
        size, draft_vocab_size = self.config.hidden_size, self.config.draft_vocab_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(len(layers) * size, config.rms_norm_eps)
        self.fc = nn.Linear(len(layers) * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False).requires_grad_(conf.train_head)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(self.config.vocab_size, dtype=torch.bool))
        init_normal(self.fc, self.midlayer)

    @classmethod
    def engine_config(cls, conf: Eagle3Conf, target: Target, **overrides: Any) -> LlamaConfig:
        """Build the config that engines read: a flat Llama config with EAGLE-3's keys."""
        layers = conf.layers or default_layers(target)
        target.check_layers(layers, default=default_layers(target))
        return super().engine_config(
            conf,
            target,
            draft_vocab_size=min(conf.vocab_size or target.vocab_size, target.vocab_size),
            eagle_aux_hidden_state_layer_ids=layers,
            num_aux_hidden_states=len(layers),
            eagle_config={"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
            **overrides,
        )

    @classmethod
    def default_keys(cls, target: Target) -> dict[str, Any]:
        return super().default_keys(target) | {
            "draft_vocab_size": target.vocab_size,
            "eagle_aux_hidden_state_layer_ids": default_layers(target),
            **dict.fromkeys(NORM_SWITCHES, False),
        }

    @classmethod
    def load(cls, directory: Path, target: Target) -> "Eagle3Draft":
        draft = cast(Eagle3Draft, super().load(directory, target))
        require(
            all(0 <= layer < target.num_layers for layer in draft.needs.layers),
            f"checkpoint: its captured layers must lie in 0..{target.num_layers - 1} for target {target.name}, got "
            f"{draft.needs.layers}; choose the draft of this target",
        )
        return draft

    @property
    def graph_switches(self) -> list[bool]:
        """Return what graphs depend on beside the tensors."""
        return [getattr(self.config, name) for name in NORM_SWITCHES]

    @property
    def layer(self) -> Eagle3Layer:
        return self.midlayer

    # --- before training --------------------------------------------------------------------

    @property
    def chosen_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    def set_vocabulary(self, kept_ids: Int[Tensor, " draft_vocab"], target: Target) -> None:
        """Copy embeddings and head from the target again, for the chosen vocabulary."""
        self.copy_target_weights(target, kept_ids)

    @torch.no_grad()
    def copy_target_weights(self, target: Target, kept_ids: Int[Tensor, " draft_vocab"] | None = None) -> None:
        """Copy the head for `kept_ids`, by default the first ids, and the embeddings if the draft has its own."""
        if target.head.weight.is_meta:
            return  # a meta tensor has a shape but no values
        if kept_ids is None:
            kept_ids = torch.arange(self.config.draft_vocab_size)
        kept_ids = kept_ids.cpu()
        super().copy_target_weights(target)
        # On the host, as a one-time operation is not worth a graph.
        copy_full(self.lm_head.weight, full_tensor(target.head.weight).cpu()[kept_ids])
        self.d2t.copy_(kept_ids - torch.arange(len(kept_ids)))
        self.t2d.copy_(torch.zeros_like(self.t2d, device="cpu").index_fill(0, kept_ids, True))

    @property
    def kept_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # --- the layer ---------------------------------------------------------------------------

    def target_features(self, target_output: TargetOutput) -> Float[Tensor, "b t h"]:
        """Return the captured layers, projected to one feature."""
        assert target_output.captured is not None
        captured = target_output.captured.to(self.fc.weight.dtype)
        return self.fc(self.input_norm(captured) if self.config.norm_before_fc else captured)

    def merge_inputs(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"], dropout_mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "b t h"], Float[Tensor, "b t width"]]:
        normed = self.midlayer.hidden_norm(hidden)
        pair = torch.cat([self.midlayer.input_layernorm(embedded), normed], -1)
        stream = normed if self.config.norm_before_residual else hidden
        return stream, drop_inputs(pair, dropout_mask, dropout=self.conf.dropout)

    def finish(self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]) -> Float[Tensor, "b t h"]:
        """Return the output of the layer, with `norm_output` after the final norm."""
        output = super().finish(stream, attended)
        return self.norm(output) if self.config.norm_output else output

    def head_inputs(self, output: Float[Tensor, "b t h"]) -> Float[Tensor, "b t h"]:
        """Apply the final norm, if `finish` has not."""
        return output if self.config.norm_output else self.norm(output)

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t draft_vocab"]:
        return self.lm_head(self.head_inputs(hidden))

    def list_loss_heads(self) -> list[nn.Linear]:
        return [self.lm_head] if self.conf.trains_heads else []

    def loss_terms(
        self, batch: Batch, target_output: TargetOutput, dropout_mask: Bool[Tensor, "b t inputs"] | None = None
    ) -> LossTerms:
        """Return the loss of `trained_depth` drafting steps at every supervised position."""
        outputs = self.unroll_steps(batch, self.target_features(target_output), dropout_mask)
        return self.distill(
            [self.head_inputs(output) for output in outputs], batch, target_output, heads=[self.lm_head.weight]
        )

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return all tensors, except the maps of a full vocabulary, which vLLM rejects."""
        omitted = ("d2t", "t2d") if self.kept_ids is None else ()
        return {name: tensor for name, tensor in super().checkpoint_tensors().items() if name not in omitted}


def default_layers(target: Target) -> list[int]:
    """Return a low, a middle and a high layer: those that engines assume, if the target has them.

    Engines assume [2, n // 2, n - 3], which are distinct and in order from 7 layers up. A target of
    one or two layers has fewer than three.
    """
    n = target.num_layers
    return [2, n // 2, n - 3] if n >= 7 else sorted({(n - 1) // 3, n // 2, n - 1})
