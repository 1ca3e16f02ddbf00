"""EAGLE-1 (https://arxiv.org/abs/2401.15077): one layer that predicts the target's next feature.

    row t:   fc(embedding of token t+1, H_t)  ->  decoder layer  ->  H_{t+1}  ->  token t+2

H_t is the target's last hidden state after its final norm. The layer has no input norm, and its
output goes straight to the target's head. EAGLE-2 (https://arxiv.org/abs/2406.16858) is the same
draft decoded with a dynamic tree. With `unroll` above 1 the draft is also trained on its own
features, as in HASS (https://arxiv.org/abs/2408.15766): no gradients flow between the steps.

Axes: B rows, T tokens, H hidden.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.distill.loss_weights import row_weights, shift_left
from models.distill.losses import LossConf
from models.drafts.base import Batch, Extras, Loss, Needs
from models.drafts.one_layer import OneLayerConf, OneLayerDraft
from models.errors import UserError
from models.layers import DecoderLayer, init_normal
from models.parallel.dtensor import full_tensor
from models.target.language_model import TargetOutput
from models.target.target import Target

NOISE_REFERENCE_LENGTH = 512  # tokens of a row at which the width of the noise is `noise`


@dataclass(kw_only=True)
class Eagle1Conf(OneLayerConf):
    """The options of EAGLE-1; everything else follows from the target."""

    method: ClassVar[str] = "eagle1"
    architecture: ClassVar[str] = "EagleLlamaForCausalLM"

    unroll: int = 1  # drafting steps in training; later ones read the draft's features (HASS)
    regression: float = 1.0  # weight of the feature loss
    token: float = 0.1  # weight of the token loss, which `loss` configures
    noise: float = 0.2  # width of the uniform noise on the target's features in training

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("regression", "token", "noise"):
            if getattr(self, key) < 0:
                raise UserError(f"draft.{key}: must not be negative, got {getattr(self, key)}")

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "Eagle1Draft":
        """Build a new draft: a random layer, and the target's embeddings and head."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = Eagle1Draft(self.build_layer_config(target), target)
        draft.conf, draft.loss_conf, draft.seed = self, loss, seed
        embeddings = target.model.get_input_embeddings()
        draft.embed_tokens.load_state_dict({"weight": full_tensor(embeddings.weight)})
        return draft.to(target.head.weight.device)

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["Eagle1Conf", "Eagle1Draft"]:
        """Load a checkpoint; raise UserError for another target, tokenizer or layout."""
        draft = Eagle1Draft(cls.read_layer_config(directory), target)
        draft.restore(directory, target)
        draft.conf = cls(**cls.fields_from_draft(draft))
        return draft.conf, draft


class Eagle1Draft(OneLayerDraft):
    """A decoder layer and its embeddings; the head is the target's."""

    method = "eagle1"

    def __init__(self, config: LlamaConfig, target: Target):
        super().__init__(config, target)
        self.conf = Eagle1Conf()
        self.needs = Needs(layers=[], hidden=True, context=True)
        self.trained_depth = self.config.training_unroll
        self.max_depth = self.config.training_max_depth
        size = self.config.hidden_size
        self.embed_tokens = nn.Embedding(self.config.vocab_size, size).requires_grad_(False)
        # There is no bias, unlike in the authors' code, because vLLM's loader supports none.
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        self.rotary = LlamaRotaryEmbedding(config)
        init_normal(self.fc, self.layers)

    @property
    def layer(self) -> DecoderLayer:
        (layer,) = self.layers
        assert isinstance(layer, DecoderLayer)
        return layer

    def target_features(self, target_output: TargetOutput) -> Float[Tensor, "b t h"]:
        """Return the target's final hidden states in the dtype of the layer."""
        return target_output.hidden.to(self.fc.weight.dtype)

    def project_inputs(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        rope: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Project embedding and feature to the residual stream, then to queries, keys, values."""
        stream = self.fc(torch.cat([embedded, hidden], -1))
        return stream, *self.layer.project_qkv(stream, rope)

    def finish_layer(
        self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]
    ) -> Float[Tensor, "b t h"]:
        return self.layer.finish(stream, attended)

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t vocab"]:
        """Apply the target's head."""
        return self.head(hidden.to(self.head.weight.dtype))

    def prepare_batch(
        self, batch: Batch, *, step: int, generators: list[np.random.Generator]  # noqa: ARG002
    ) -> Extras:  # fmt: skip
        """Draw noise for the features, because the features are not exact when it drafts."""
        if not self.conf.noise:
            return {}
        length, size = batch.input_ids.shape[1], self.config.hidden_size
        uniform = [generator.random((length, size), dtype=np.float32) for generator in generators]
        width = self.conf.noise * NOISE_REFERENCE_LENGTH / length
        return {"noise": width * (torch.from_numpy(np.stack(uniform)) - 0.5)}

    def loss(
        self, batch: Batch, target_output: TargetOutput, noise: Float[Tensor, "b t h"] | None = None
    ) -> Loss:
        """Compute the distance to the target's next features, and the loss of their tokens."""
        features = self.target_features(target_output)
        noisy_features = features if noise is None else features + noise
        outputs = self.unroll_steps(batch, noisy_features, carries_grad=False)
        tokens = self.distill(outputs, batch, target_output, heads=[full_tensor(self.head.weight)])
        weight, _ = row_weights(
            batch.answer_mask, batch.document_ids, steps=self.trained_depth, conf=self.loss_conf
        )
        targets = [shift_left(features, 1 + i) for i in range(self.trained_depth)]
        errors = F.smooth_l1_loss(torch.stack(outputs), torch.stack(targets), reduction="none")
        distance = errors.float().mean(-1)
        is_counted = (weight != 0).flatten(1)
        sums = torch.stack([(distance.flatten(1) * is_counted).sum(-1), is_counted.sum(-1)], -1)
        metrics = {f"distance_{i + 1}": step_sums.detach() for i, step_sums in enumerate(sums)}
        return Loss(
            total=self.conf.regression * (distance * weight).sum() + self.conf.token * tokens.total,
            weight=tokens.weight,
            metrics=tokens.metrics | metrics,
        )
