"""EAGLE-1 (https://arxiv.org/abs/2401.15077): one layer that predicts the target's next feature.

    row t:   fc(embedding of token t+1, H_t)  ->  decoder layer  ->  H_{t+1}  ->  token t+2

H_t is the target's last hidden state after its final norm. The layer has no input norm, and nothing
stands between it and the target's head. EAGLE-2 (https://arxiv.org/abs/2406.16858) is the same
draft decoded with a dynamic tree. With `unroll` above 1 it learns on its own features as well, as
HASS does (https://arxiv.org/abs/2408.15766): steps are passes without gradients between them.

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

from models.distill.loss_weights import row_weights, sooner
from models.distill.losses import LossConf
from models.drafts.base import Batch, Extras, Loss, Needs
from models.drafts.one_layer import OneLayerConf, OneLayerDraft
from models.errors import UserError
from models.layers import DecoderLayer, start_small
from models.parallel.dtensor import whole
from models.target.language_model import Seen
from models.target.target import Target

NOISE_LENGTH = 512  # tokens of a row for which `noise` is the width as it stands, as published


@dataclass(kw_only=True)
class Eagle1Conf(OneLayerConf):
    """What is left to choose; the rest follows from the target."""

    method: ClassVar[str] = "eagle1"
    architecture: ClassVar[str] = "EagleLlamaForCausalLM"

    unroll: int = 1  # steps it is trained on; above 1 on its own features, as HASS
    regression: float = 1.0  # weight of the distance between features
    token: float = 0.1  # weight of `loss` on the tokens they give
    noise: float = 0.2  # width of the uniform noise on the target's features, while training

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("regression", "token", "noise"):
            if getattr(self, key) < 0:
                raise UserError(f"draft.{key}: must not be negative, got {getattr(self, key)}")

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "Eagle1Draft":
        """A new draft: random layer, the target's own embeddings and head."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = Eagle1Draft(self.layer(target), target)
        draft.conf, draft.loss_conf, draft.seed = self, loss, seed
        embeddings = target.model.get_input_embeddings()
        draft.embed_tokens.load_state_dict({"weight": whole(embeddings.weight)})
        return draft.to(target.head.weight.device)

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["Eagle1Conf", "Eagle1Draft"]:
        draft = Eagle1Draft(cls.read_layer(directory), target)
        draft.restore(directory, target)
        draft.conf = cls(**cls.choices(draft))
        return draft.conf, draft


class Eagle1Draft(OneLayerDraft):
    """The layer and its embeddings; its head is the target's."""

    method = "eagle1"

    def __init__(self, config: LlamaConfig, target: Target):
        super().__init__(config, target)
        self.conf = Eagle1Conf()
        self.needs = Needs(layers=[], hidden=True, context=True)
        self.trained_depth = self.config.training_unroll
        self.max_depth = self.config.training_max_depth
        size = self.config.hidden_size
        self.embed_tokens = nn.Embedding(self.config.vocab_size, size).requires_grad_(False)
        # no bias, though the authors' has one: vLLM's loader knows none
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        self.rotary = LlamaRotaryEmbedding(config)
        start_small(self.fc, self.layers)

    @property
    def layer(self) -> DecoderLayer:
        (layer,) = self.layers
        assert isinstance(layer, DecoderLayer)
        return layer

    def features(self, seen: Seen) -> Float[Tensor, "b t h"]:
        return seen.hidden.to(self.fc.weight.dtype)

    def enter(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        turn: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        stream = self.fc(torch.cat([embedded, hidden], -1))
        return stream, *self.layer.project(stream, turn)

    def finish(
        self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]
    ) -> Float[Tensor, "b t h"]:
        return self.layer.finish(stream, attended)

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t vocab"]:
        return self.head(hidden.to(self.head.weight.dtype))

    def prepare_batch(
        self, batch: Batch, *, step: int, generators: list[np.random.Generator]  # noqa: ARG002
    ) -> Extras:  # fmt: skip
        """Draw the noise on the features: what it reads when it drafts is not exact either."""
        if not self.conf.noise:
            return {}
        length, size = batch.ids.shape[1], self.config.hidden_size
        drawn = [numbers.random((length, size), dtype=np.float32) for numbers in generators]
        width = self.conf.noise * NOISE_LENGTH / length
        return {"noise": width * (torch.from_numpy(np.stack(drawn)) - 0.5)}

    def loss(self, batch: Batch, seen: Seen, noise: Float[Tensor, "b t h"] | None = None) -> Loss:
        """Distance to the target's next features, and what the target's head makes of them."""
        features = self.features(seen)
        read = features if noise is None else features + noise
        outputs = self.unroll(batch, read, carries=False)
        tokens = self.distil(outputs, batch, seen, heads=[whole(self.head.weight)])
        weight, _ = row_weights(
            batch.answer, batch.document, steps=self.trained_depth, conf=self.loss_conf
        )
        wanted = [sooner(features, 1 + i) for i in range(self.trained_depth)]
        apart = F.smooth_l1_loss(torch.stack(outputs), torch.stack(wanted), reduction="none")
        distance = apart.float().mean(-1)
        counted = (weight != 0).flatten(1)
        sums = torch.stack([(distance.flatten(1) * counted).sum(-1), counted.sum(-1)], -1)
        metrics = {f"distance_{i + 1}": pair.detach() for i, pair in enumerate(sums)}
        return Loss(
            total=self.conf.regression * (distance * weight).sum() + self.conf.token * tokens.total,
            weight=tokens.weight,
            metrics=tokens.metrics | metrics,
        )
