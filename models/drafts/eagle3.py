"""EAGLE-3 (https://arxiv.org/abs/2503.01840): one layer that drafts from the target's features.

    row t:   fc(low, mid, high captured at t), embedding of token t+1   ->   token t+2
    step i:  the same row, fed its own output and the embedding of token t+1+i -> token t+2+i

Training unrolls the steps that decoding performs (training-time test), so that the layer learns to
live on its own output. The recurrence carries the layer's output before the final norm, and the
concatenation puts the embedding first: as vLLM and vLLM Neuron read `Eagle3LlamaForCausalLM`.

Axes: B rows, T tokens, H hidden.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.distill.losses import LossConf
from models.drafts.base import Batch, Draft, Loss, Needs
from models.drafts.one_layer import OneLayerConf, OneLayerDraft
from models.errors import UserError
from models.layers import RMSNorm, WideLayer, start_small
from models.parallel.dtensor import whole
from models.speculate import draft_vocab
from models.target.language_model import Seen
from models.target.target import Target


@dataclass(kw_only=True)
class Eagle3Conf(OneLayerConf):
    """What is left to choose; the rest follows from the target."""

    method: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = "Eagle3LlamaForCausalLM"

    layers: list[int] | None = None  # captured; None = those of default_layers
    vocab_size: int | None = None  # of a reduced draft vocabulary; None = the target's, the most
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and any(b <= a for a, b in pairwise(self.layers)):
            raise UserError(
                f"draft.layers: must be strictly increasing, got {self.layers}; "
                "null takes low, middle and high"
            )

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "Eagle3Draft":
        """A new draft: random layer, the target's own embeddings and head rows."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = Eagle3Draft(self.describe(target), target)
        draft.loss_conf, draft.seed = loss, seed
        draft.embed_tokens.requires_grad_(self.train_embeddings)
        draft.adopt(target, torch.arange(draft.config.draft_vocab_size))
        return draft.to(target.head.weight.device)

    def describe(self, target: Target) -> LlamaConfig:
        """The draft as engines read it: a flat Llama config with EAGLE-3's own keys."""
        layers = self.layers or default_layers(target)
        target.check_layers(layers, default=default_layers(target))
        return self.layer(
            target,
            draft_vocab_size=min(self.vocab_size or target.vocab_size, target.vocab_size),
            eagle_aux_hidden_state_layer_ids=layers,
            num_aux_hidden_states=len(layers),
            eagle_config={
                "eagle_aux_hidden_state_layer_ids": layers,
                "use_aux_hidden_state": True,
            },
            norm_before_residual=False,
        )

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["Eagle3Conf", "Eagle3Draft"]:
        config = cls.read_layer(
            directory,
            draft_vocab_size=target.vocab_size,
            eagle_aux_hidden_state_layer_ids=default_layers(target),
        )
        draft = Eagle3Draft(config, target)
        draft.restore(directory, target)
        kept = draft_vocab.kept_ids(draft.d2t.cpu())
        draft.t2d.copy_(draft_vocab.membership(kept, config.vocab_size))
        draft.embed_tokens.requires_grad_(False)
        conf = cls(
            **cls.choices(draft),
            layers=draft.needs.layers,
            vocab_size=draft.config.draft_vocab_size,
        )
        return conf, draft

    def untrained(self, draft: Draft, target: Target) -> Draft | str:
        before = super().untrained(draft, target)
        assert isinstance(draft, Eagle3Draft)
        if isinstance(before, Eagle3Draft) and draft.kept_ids is not None:
            before.adopt(target, draft.kept_ids)
        return before


def default_layers(target: Target) -> list[int]:
    """Return a low, a middle and a high layer: those that engines assume where they exist.

    Engines assume [2, n // 2, n - 3], which are three layers from 7 layers up. Smaller targets have
    fewer to choose from, and their checkpoints name what was chosen.
    """
    n = target.num_layers
    return [2, n // 2, n - 3] if n >= 7 else sorted({(n - 1) // 3, n // 2, n - 1})


class Eagle3Draft(OneLayerDraft):
    """The layer, its embeddings and head, and how it learns and drafts."""

    method = "eagle3"

    d2t: Int[Tensor, " draft_vocab"]  # target id - draft id
    t2d: Bool[Tensor, " vocab"]  # whether a target id has a draft id

    def __init__(self, config: LlamaConfig, target: Target):
        super().__init__(config, target)
        layers = list(self.config.eagle_aux_hidden_state_layer_ids)
        self.needs = Needs(layers=layers, hidden=False, context=True)
        self.trained_depth = self.config.training_unroll
        self.max_depth = self.config.training_max_depth
        size, kept = self.config.hidden_size, self.config.draft_vocab_size
        self.embed_tokens = nn.Embedding(self.config.vocab_size, size)
        self.fc = nn.Linear(len(self.needs.layers) * size, size, bias=False)
        self.midlayer = WideLayer(config)
        self.norm = RMSNorm(size, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, kept, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(kept, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(self.config.vocab_size, dtype=torch.bool))
        start_small(self.fc, self.midlayer)

    # --- before training --------------------------------------------------------------------

    def prepare(
        self, counts: Int[Tensor, " vocab"], *, target: Target, always: list[int]
    ) -> dict[str, float]:
        """Choose the reduced vocabulary by how often the answers use each token."""
        kept = draft_vocab.choose(counts, self.config.draft_vocab_size, always)
        self.adopt(target, kept)
        return {"coverage": draft_vocab.coverage(counts, kept)}

    @torch.no_grad()
    def adopt(self, target: Target, kept: Int[Tensor, " draft_vocab"]) -> None:
        """Take the target's embeddings, and its head rows for the kept token ids."""
        if target.head.weight.is_meta:
            return  # an outline has shapes alone
        kept = kept.cpu()  # no graphs are made for what is done once
        self.embed_tokens.weight.copy_(whole(target.model.get_input_embeddings().weight))
        self.lm_head.weight.copy_(whole(target.head.weight).cpu()[kept])
        self.d2t.copy_(draft_vocab.offsets(kept))
        self.t2d.copy_(draft_vocab.membership(kept, self.config.vocab_size))

    @property
    def kept_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """Target ids of a reduced draft vocabulary; None where it is the target's own."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return draft_vocab.kept_ids(self.d2t)

    # --- the layer ---------------------------------------------------------------------------

    def features(self, seen: Seen) -> Float[Tensor, "b t h"]:
        return self.fc(seen.captured.to(self.fc.weight.dtype))

    def enter(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        turn: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        return hidden, *self.midlayer.project_both(embedded, hidden, turn)

    def finish(
        self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]
    ) -> Float[Tensor, "b t h"]:
        return self.midlayer.finish(stream, attended)

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t draft_vocab"]:
        return self.lm_head(self.norm(hidden))

    def loss(self, batch: Batch, seen: Seen) -> Loss:
        """Distil `trained_depth` steps of drafting at every supervised row."""
        outputs = self.unroll(batch, self.features(seen), carries=True)
        outputs = [self.norm(output) for output in outputs]
        return self.distil(outputs, batch, seen, heads=[self.lm_head.weight])

    def tensors(self) -> dict[str, Tensor]:
        """Without the vocabulary maps where it is full: vLLM refuses them there."""
        maps = ("d2t", "t2d") if self.kept_ids is None else ()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in maps}
