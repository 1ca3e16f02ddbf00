"""Medusa-2 (https://arxiv.org/abs/2401.10774): heads and target learn together.

The target gets low-rank adapters, so that its hidden states serve the heads better, and
self-distillation keeps its outputs: its distributions are held to those it had before.

    loss = keep * KL(target before || adapted) + heads * ramp * loss of the Medusa heads

The terms count different rows, so each is a mean over the rows of its own in the whole step.
What verifies the draft is then the adapted target, another model than the one it was made from: it
is saved beside the heads, and reports compare with it and say so.
"""

import copy
import math
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from models import checkpoint
from models.distill.loss_weights import row_weights, sooner, token_weights
from models.distill.losses import LossConf, LossName, chunked_distillation
from models.drafts.base import Batch, Draft, Extras, Loss
from models.drafts.medusa import MedusaConf, MedusaConfig, MedusaDraft
from models.lora import LoraConf, merged
from models.target.language_model import Seen, Transformer
from models.target.target import Target, TargetConf

OWN = "adapted_target"  # key of config.json: the folder of the adapted target
FASTER = "lr_scale"  # attribute of a parameter that learns faster than the others


@dataclass(kw_only=True)
class Medusa2Conf(MedusaConf):
    """Medusa-1's choices, the adapters', and how the two losses are weighed."""

    method: ClassVar[str] = "medusa2"
    adapts: ClassVar[bool] = True

    lora: LoraConf = field(default_factory=lambda: LoraConf(rank=32, alpha=16.0))
    keep_weight: float = 1.0  # of the distance to the target before
    heads_weight: float = 0.2  # of the loss of the heads
    heads_warmup: int = 40  # optimizer steps over which `heads_weight` rises; 0 = at once
    heads_lr_scale: float = 4.0  # the heads' learning rate / the adapters'

    def build(self, target: Target, *, loss: LossConf, seed: int) -> "Medusa2Draft":
        """A new draft: heads that repeat the target's own guess, adapters that change nothing."""
        draft = self.new(target)
        for parameter in draft.parameters():
            setattr(parameter, FASTER, self.heads_lr_scale)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft.adapt(target, self.lora)
        draft.conf, draft.loss_conf, draft.seed = self, loss, seed
        return draft.to(target.head.weight.device)

    def new(self, target: Target) -> "Medusa2Draft":
        """The heads alone."""
        draft = Medusa2Draft(MedusaConfig(**self.describe(target)), target)
        for head in draft.heads:
            head.load_state_dict({"weight": target.head.weight})
        return draft.to(target.head.weight.device)

    @classmethod
    def reads(cls, config: dict[str, Any]) -> bool:
        return super().reads(config) and OWN in config

    @classmethod
    def load(cls, directory: Path, target: Target) -> tuple["Medusa2Conf", "Medusa2Draft"]:
        config = MedusaConfig(**checkpoint.read_config(directory))
        draft = Medusa2Draft(config, target)
        draft.restore(directory, target)
        own = TargetConf(path=str(directory / getattr(config, OWN))).build(target.device)
        own.name = f"{target.name} adapted by {directory}"
        draft.own_target = own
        draft.conf = cls(
            heads=draft.max_depth,
            blocks=draft.config.num_hidden_layers,
            own_heads=not draft.config.original_lm_head,
        )
        return draft.conf, draft

    def untrained(self, draft: Draft, target: Target) -> Draft | str:  # noqa: ARG002
        """Heads that repeat the guess of whichever target verifies them."""
        return self.new(target)


class Medusa2Draft(MedusaDraft):
    """Medusa's heads, and the adapters of the target while it learns."""

    method = "medusa2"

    def __init__(self, config: MedusaConfig, target: Target):
        super().__init__(config, target)
        self.needs = replace(self.needs, storable=False)  # the adapted target sees anew
        self.conf = Medusa2Conf()
        self.own_target: Target | None = None  # the adapted one, of a checkpoint
        self.lm: Transformer | None = None  # the adapted one, while it learns

    def adapt(self, target: Target, lora: LoraConf) -> None:
        """Adapters around the target's own weights: shared, so that they take no memory twice."""
        shared = {id(t): t for t in [*target.model.parameters(), *target.model.buffers()]}
        model = copy.deepcopy(target.model, shared)
        lora.adapt(model)
        # not a submodule: the frozen weights are neither the draft's nor its saved state's
        self.lm = Transformer(model, device=target.device)
        adapters = [p for p in model.parameters() if p.requires_grad]
        for parameter in adapters:
            parameter.data = parameter.data.float()
        self.adapters = nn.ParameterList(adapters)

    def prepare_batch(
        self, batch: Batch, *, step: int, generators: list[np.random.Generator]  # noqa: ARG002
    ) -> Extras:  # fmt: skip
        """Raise the heads' share as a sine: at first their gradients would tear at the target."""
        done = min((step + 1) / max(self.conf.heads_warmup, 1), 1.0)
        return {"ramp": torch.tensor(math.sin(done * math.pi / 2))}

    def term_weights(self, batch: Batch) -> Float[Tensor, " terms"]:
        """Weigh the distance to the target before, and the heads."""
        masks = {"conf": self.loss_conf, "context": batch.context}
        _, kept = token_weights(batch.answer, batch.document, **masks)
        _, heads = row_weights(batch.answer, batch.document, steps=1, **masks)
        return torch.stack([kept, heads])

    def loss(
        self, batch: Batch, seen: Seen, ramp: Tensor | float = 1.0,
        step_weights: Float[Tensor, " terms"] | None = None,
    ) -> Loss:  # fmt: skip
        """Without `step_weights` the batch is the whole step."""
        assert self.lm is not None
        adapted = self.lm.see(batch.ids, positions=batch.positions, mask=batch.attends(), layers=[])
        weight, whole = token_weights(
            batch.answer, batch.document, conf=self.loss_conf, context=batch.context
        )
        kept, metrics = chunked_distillation(
            adapted.hidden.flatten(0, 1),
            seen.hidden.flatten(0, 1),
            draft_heads=[self.head.weight],
            target_head=self.head,
            weight=weight.flatten(),
            kept_ids=None,
            labels=sooner(batch.ids, 1).flatten(),
            conf=replace(self.loss_conf, name=LossName.forward_kl),
        )
        verifier = Seen(hidden=adapted.hidden.detach(), captured=adapted.captured)
        outputs = [block(adapted.hidden.to(self.heads[0].weight.dtype)) for block in self.blocks]
        heads = self.distil(outputs, batch, verifier, heads=[h.weight for h in self.heads])
        # The loop divides by the first term's weight. Rows that teach a head are among those that
        # are kept, so this weight is not 0 where the other is not.
        first, second = self.term_weights(batch) if step_weights is None else step_weights
        ratio = torch.where(second > 0, first / second, 0.0)
        return Loss(
            total=self.conf.keep_weight * kept
            + self.conf.heads_weight * ramp * ratio * heads.total,
            weight=whole,
            metrics=heads.metrics | {f"kept_{name}": pair for name, pair in metrics.items()},
        )

    def verifier(self, target: Target) -> Target | None:
        """The adapted target: of the checkpoint, or as it is at this moment."""
        if self.lm is None:  # read from a checkpoint; None before distillation
            return self.own_target
        return target.with_weights(self.lm, name=f"{target.name} adapted")

    def tensors(self) -> dict[str, Tensor]:
        """The heads, as of Medusa-1."""
        return {n: t for n, t in super().tensors().items() if not n.startswith("adapters.")}

    def save(self, directory: Path, target: Target) -> None:
        """The heads, and in a folder of its own the adapted target as any Hugging Face model."""
        assert self.lm is not None
        dtype = target.head.weight.dtype
        tensors = {name: tensor.to(dtype) for name, tensor in merged(self.lm.model).items()}
        place = directory / f"target-{checkpoint.digest(tensors)[:12]}"
        if not place.exists():
            with checkpoint.writing(directory), checkpoint.atomic_directory(place) as partial:
                target.model.save_pretrained(partial, state_dict=tensors)
                checkpoint.write_config(
                    partial / checkpoint.CONFIG, checkpoint.read_config(partial)
                )
                if target.tokenizer is not None:
                    target.tokenizer.save_pretrained(partial)
        setattr(self.config, OWN, place.name)
        super().save(directory, target)
        for other in directory.glob("target-*"):
            if other != place:  # of an earlier step; the heads no longer name it
                shutil.rmtree(other)
