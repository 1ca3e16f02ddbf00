"""EAGLE-1 (https://arxiv.org/abs/2401.15077): one layer that predicts the target's next feature.

    position t:  fc(embedding of token t+1, H_t)  ->  decoder layer  ->  H_{t+1}  ->  token t+2

H_t is the target's last hidden state after its final norm. The layer has no input norm, and its
output goes straight to the target's head. EAGLE-2 (https://arxiv.org/abs/2406.16858) is the same
draft decoded with a dynamic tree. With `ttt_steps` above 1 the draft is also trained on its own
features, as in HASS (https://arxiv.org/abs/2408.15766); no gradients flow back through these.

Axes: B rows, T tokens, H hidden.
"""

from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from models.distill.config import LossConf
from models.distill.loss_weights import position_weights, shift_left
from models.drafts.base import Batch, Extras, Loss, Needs
from models.drafts.config.eagle1 import Eagle1Conf
from models.drafts.dropout import drop_inputs
from models.drafts.one_layer import OneLayerDraft
from models.layers import DecoderLayer, init_normal
from models.parallel.dtensor import full_tensor
from models.target.language_model import TargetOutput
from models.target.target import Target

NOISE_REFERENCE_LENGTH = 512  # tokens of a document whose noise is `feature_noise` wide


class Eagle1Draft(OneLayerDraft):
    """A decoder layer and its embeddings; the head is the target's."""

    conf_class = Eagle1Conf

    def __init__(
        self, conf: Eagle1Conf, config: LlamaConfig, target: Target, *,
        loss: LossConf | None = None, seed: int | None = None,
    ):  # fmt: skip
        super().__init__(conf, config, target, loss=loss, seed=seed)
        self.needs = Needs(layers=[], hidden=True, context=True)
        self.embed_tokens.requires_grad_(False)
        # There is no bias, unlike in the authors' code, because vLLM's loader supports none.
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        init_normal(self.fc, self.layers)

    @property
    def layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])

    def target_features(self, target_output: TargetOutput) -> Float[Tensor, "b t h"]:
        """Return the target's final hidden states in the dtype of the layer."""
        return target_output.hidden.to(self.fc.weight.dtype)

    def project_inputs(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        rope: tuple[Tensor, Tensor], kept: Bool[Tensor, "b t inputs"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Project embedding and feature to the residual stream, then to queries, keys, values."""
        inputs = torch.cat([embedded, hidden], -1)
        stream = self.fc(drop_inputs(inputs, kept, dropout=self.conf.dropout))
        return stream, *self.layer.project_qkv(stream, rope)

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t vocab"]:
        """Apply the target's head."""
        return self.head(hidden.to(self.head.weight.dtype))

    def copy_target_weights(
        self, target: Target, kept_ids: Int[Tensor, " draft_vocab"] | None = None  # noqa: ARG002
    ) -> None:  # fmt: skip
        """Copy the target's embeddings into the draft."""
        self.embed_tokens.load_state_dict(
            {"weight": full_tensor(target.model.get_input_embeddings().weight)}
        )

    def prepare_batch(
        self, batch: Batch, *, step: int, generators: list[np.random.Generator]
    ) -> Extras:  # fmt: skip
        """Return uniform noise for the features, which are not exact when the draft unrolls.

        A longer document gets less noise, in inverse proportion to its length in the row
        (SafeAILab/EAGLE, eagle/train/main.py, `AddUniformNoise`).
        """
        extras = super().prepare_batch(batch, step=step, generators=generators)
        if not self.conf.feature_noise:
            return extras
        shape = (batch.input_ids.shape[1], self.config.hidden_size)
        uniform = [generator.random(shape, dtype=np.float32) for generator in generators]
        lengths = count_document_tokens(batch.document_ids)
        width = self.conf.feature_noise * NOISE_REFERENCE_LENGTH / lengths[:, :, None]
        return extras | {"noise": width * (torch.from_numpy(np.stack(uniform)) - 0.5)}

    def loss(
        self, batch: Batch, target_output: TargetOutput,
        noise: Float[Tensor, "b t h"] | None = None, kept: Bool[Tensor, "b t inputs"] | None = None,
    ) -> Loss:  # fmt: skip
        """Return the weighted sum of the feature loss (smooth L1) and the token distillation loss.

        `noise` is added to the features that the draft reads, not to those that it predicts.
        """
        features = self.target_features(target_output)
        outputs = self.unroll_steps(
            batch,
            features if noise is None else features + noise,
            backprop_through_outputs=False,
            kept=kept,
        )
        head = full_tensor(self.head.weight)
        # In evaluations no autocast brings fp32 outputs to the dtype of the target's head.
        token_loss = self.distill(
            [output.to(head.dtype) for output in outputs], batch, target_output, heads=[head]
        )
        weights, _ = position_weights(
            batch.answer_mask, batch.document_ids, steps=self.trained_depth, conf=self.loss_conf
        )
        targets = [shift_left(features, 1 + i) for i in range(self.trained_depth)]
        errors = F.smooth_l1_loss(torch.stack(outputs), torch.stack(targets), reduction="none")
        distance = errors.float().mean(-1)
        is_counted = (weights != 0).flatten(1)
        # (sum, count) of each step
        pairs = torch.stack([(distance.flatten(1) * is_counted).sum(-1), is_counted.sum(-1)], -1)
        metrics = {f"distance_{i + 1}": pair.detach() for i, pair in enumerate(pairs)}
        return Loss(
            total=self.conf.feature_loss_weight * (distance * weights).sum()
            + self.conf.token_loss_weight * token_loss.total,
            weight=token_loss.weight,
            metrics=token_loss.metrics | metrics,
        )


def count_document_tokens(document_ids: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
    """Return for each position the tokens that its document has in the row.

    >>> count_document_tokens(torch.tensor([[4, 4, 4, 7, 7]])).tolist()
    [[3, 3, 3, 2, 2]]
    """
    counts = []
    for row in document_ids:
        _, document, tokens = row.unique(return_inverse=True, return_counts=True)
        counts.append(tokens[document])
    return torch.stack(counts)
