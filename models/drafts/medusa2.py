"""Medusa-2 (https://arxiv.org/abs/2401.10774): heads and target are trained together.

    loss = keep_weight * KL(original target || target with low-rank adapters)
           + heads_weight * ramp * loss of the Medusa heads

The terms count different positions, so each is a mean over its own positions of the whole optimizer
step. The adapted target then verifies the draft; see docs/heads.md.
"""

import copy
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from models.batch import Batch
from models.checkpoints import checkpoint, checkpoint_files
from models.checkpoints.fingerprints import hash_tensors
from models.checkpoints.tokenizer_files import save_tokenizer
from models.drafts.base import Draft, Extras, HeadTerm, LossTerms, require_no_bias
from models.drafts.medusa import MedusaConfig, MedusaDraft
from models.drafts.options import Medusa2Conf
from models.io.files import atomic_directory, report_disk_errors
from models.lora import add_adapters, merge_adapters
from models.losses.config import LossConf, LossName
from models.losses.loss_weights import position_weights, shift_left, token_weights
from models.targets.config import TargetConf
from models.targets.language_model import LanguageModel, TargetOutput
from models.targets.loading import load_target
from models.targets.target import Target

TARGET_FOLDER_KEY = "adapted_target"  # key of config.json
LR_SCALE_ATTRIBUTE = "lr_scale"  # a parameter's factor on the learning rate


class Medusa2Draft(MedusaDraft):
    """Medusa heads and, during training, the adapters of the target."""

    conf_class = Medusa2Conf

    def __init__(self, conf: Medusa2Conf, config: MedusaConfig, target: Target):
        super().__init__(conf, config, target)
        self.needs = replace(self.needs, storable=False)  # training changes the outputs
        self.adapted_target: Target | None = None  # loaded from a checkpoint
        self.lm: LanguageModel | None = None  # the adapted target during training

    @classmethod
    def build(cls, conf: Medusa2Conf, target: Target, *, loss: LossConf, seed: int) -> "Medusa2Draft":
        """Build heads that predict what the target's head does; the adapters change nothing yet."""
        require_no_bias(target.head, conf.method)
        draft = cast(Medusa2Draft, super().build(conf, target, loss=loss, seed=seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft.add_adapters(target)
        return draft

    @classmethod
    def load(cls, directory: Path, target: Target) -> "Medusa2Draft":
        """Load the heads and the adapted target; raise UserError if they do not match."""
        draft = cast(Medusa2Draft, super().load(directory, target))
        folder = directory / getattr(draft.config, TARGET_FOLDER_KEY)
        draft.adapted_target = load_target(
            TargetConf(path=str(folder)), target.device, name=f"{target.name}, adapted in {directory}"
        )
        return draft

    @classmethod
    def matches_config(cls, config: dict[str, Any]) -> bool:
        """Return whether it is a Medusa checkpoint that names an adapted target."""
        return super().matches_config(config) and TARGET_FOLDER_KEY in config

    def rebuild_untrained(self, target: Target) -> Draft | str:
        """Return new heads, which predict what the head of the verifying target predicts."""
        untrained = super().build(self.conf, target, loss=self.loss_conf, seed=0)
        return untrained.convert_weights(target)

    def add_adapters(self, target: Target) -> None:
        """Set `lm` to a copy of the target with adapters, and register the adapters as parameters.

        The copy shares the frozen weights to save memory. The heads get their learning-rate factor.
        """
        for parameter in self.parameters():
            setattr(parameter, LR_SCALE_ATTRIBUTE, self.conf.heads_lr_scale)
        shared = {id(t): t for t in [*target.model.parameters(), *target.model.buffers()]}
        model = copy.deepcopy(target.model, shared)
        add_adapters(model.get_decoder(), rank=self.conf.lora.rank, alpha=self.conf.lora.alpha)
        # A LanguageModel is not a submodule, so the frozen weights stay out of the draft's state.
        self.lm = LanguageModel(model, device=target.device)
        adapters = [p for p in model.parameters() if p.requires_grad]
        for parameter in adapters:
            parameter.data = parameter.data.float()
        self.adapters = nn.ParameterList(adapters)

    def start_from_first_stage(self, directory: Path, target: Target) -> None:
        """Take the heads of a Medusa-1 checkpoint."""
        heads = MedusaDraft.load(directory, target)
        missing, unexpected = self.load_state_dict(heads.state_dict(), strict=False)
        assert not unexpected
        assert all(name.startswith("adapters.") for name in missing)

    def prepare_batch(self, batch: Batch, *, step: int, generators: list[np.random.Generator]) -> Extras:
        """Return the ramp of the heads' loss: a quarter of a sine wave, from 0 to 1.

        Without a ramp, the gradients of untrained heads would distort the target.
        """
        progress = min((step + 1) / max(self.conf.heads_warmup, 1), 1.0)
        return {"ramp": torch.tensor(math.sin(progress * math.pi / 2))}

    def term_weights(self, batch: Batch) -> Float[Tensor, " terms"]:
        """Return the weights of the distance to the original target and of the heads' loss."""
        _, keep_sum = token_weights(batch, conf=self.loss_conf)
        # The divisor is the sum at step 0, whatever the number of steps.
        _, heads_sum = position_weights(batch, steps=1, conf=self.loss_conf)
        return torch.stack([keep_sum, heads_sum])

    def loss_terms(
        self,
        batch: Batch,
        target_output: TargetOutput,
        ramp: Tensor | float = 1.0,
        term_weight_sums: Float[Tensor, " terms"] | None = None,
    ) -> LossTerms:
        """Return the sum of both terms; without `term_weight_sums` the batch is the whole step."""
        assert self.lm is not None
        ids, mask = batch.input_ids, batch.attention_mask()
        adapted = self.lm.forward_hidden(
            ids, positions=batch.positions, mask=mask, layers=[], recomputes=self.recomputes
        )
        weight, total_weight = token_weights(batch, conf=self.loss_conf)
        keep = HeadTerm(
            draft_hidden=adapted.hidden.flatten(0, 1),
            target_hidden_or_topk=target_output.hidden.flatten(0, 1),
            draft_heads=[self.head.weight],
            target_head=self.head,
            weight=weight.flatten(),
            kept_ids=None,
            labels=shift_left(batch.input_ids, 1).flatten(),
            conf=replace(self.loss_conf, name=LossName.forward_kl),
            scale=self.conf.keep_weight,
            prefix="kept_",
        )
        # The loop divides by the first term's weight, so the other term is scaled by their ratio.
        # Positions that count for a head count for the first term too, so that its weight is 0 only
        # if both are.
        keep_sum, heads_sum = self.term_weights(batch) if term_weight_sums is None else term_weight_sums
        ratio = torch.where(heads_sum > 0, keep_sum / heads_sum, 0.0)
        outputs = [block(adapted.hidden.to(self.dtype)) for block in self.blocks]
        seen = TargetOutput(hidden=adapted.hidden.detach(), captured=adapted.captured)
        heads = [head.weight for head in self.heads]
        terms = self.distill(outputs, batch, seen, heads=heads, scale=self.conf.heads_weight * ramp * ratio)
        return LossTerms(weight=total_weight, heads=[keep, *terms.heads])

    def get_adapted_target(self, target: Target) -> Target | None:
        """Return the adapted target: that of the checkpoint, or the current one in training."""
        if self.lm is None:  # read from a checkpoint; None before distillation
            return self.adapted_target
        return target.with_weights(self.lm, name=f"{target.name} adapted")

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the heads only: those of a Medusa-1 checkpoint."""
        return {
            name: tensor for name, tensor in super().checkpoint_tensors().items() if not name.startswith("adapters.")
        }

    def save(self, directory: Path, target: Target, *, writes: bool = True) -> None:
        """Write the heads and, in a subfolder, the adapted target as a Hugging Face model."""
        if not writes:
            return
        assert self.lm is not None
        tensors = {name: tensor.to(target.head.weight.dtype) for name, tensor in merge_adapters(self.lm.model).items()}
        target_folder = directory / f"target-{hash_tensors(tensors)[:12]}"
        if not target_folder.exists():
            with report_disk_errors(directory), atomic_directory(target_folder) as partial:
                target.model.save_pretrained(partial, state_dict=tensors)
                checkpoint.write_config(partial / checkpoint_files.CONFIG_FILE, checkpoint_files.read_config(partial))
                save_tokenizer(target.tokenizer, partial, files=target.tokenizer_folder)
        setattr(self.config, TARGET_FOLDER_KEY, target_folder.name)
        super().save(directory, target)
        for old_folder in directory.glob("target-*"):
            if old_folder != target_folder:  # of an earlier step: the config no longer refers to it
                shutil.rmtree(old_folder)
