"""What all drafts that read a target's features share: how they are distilled, saved and read.

Axes: B rows, T tokens, H hidden.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig

from models import checkpoint
from models.distill.loss_weights import later, row_weights, sooner
from models.distill.losses import LossConf, chunked_distillation
from models.drafts.base import Batch, Draft, DraftConf, Loss
from models.errors import UserError
from models.target import architectures
from models.target.language_model import Seen
from models.target.target import Target


@dataclass(kw_only=True)
class FeatureConf(DraftConf):
    """A draft of one target. Rebuilt from its seed, it is as it was before distillation."""

    def untrained(self, draft: Draft, target: Target) -> Draft | str:
        assert isinstance(draft, FeatureDraft)
        if draft.seed is None:
            return "the checkpoint does not say with which seed it was started"
        return self.build(target, loss=draft.loss_conf, seed=draft.seed)


class FeatureDraft(Draft):
    """Learns to propose several positions from what the target computed at one."""

    def __init__(self, config: Any, target: Target):
        super().__init__()
        self.config = config  # what config.json says
        self.target_vocab: int = config.vocab_size
        self.loss_conf = LossConf()
        self.seed: int | None = None
        # of the target, frozen; a tuple, so that they are not submodules
        self._frozen: tuple[nn.Embedding, nn.Linear] = (
            target.model.get_input_embeddings(),
            target.head,
        )

    @property
    def head(self) -> nn.Linear:
        """The target's own, frozen."""
        return self._frozen[1]

    def distil(
        self, outputs: list[Float[Tensor, "b t width"]], batch: Batch, seen: Seen, *,
        heads: list[Tensor],
    ) -> Loss:  # fmt: skip
        """Step i of row t proposes token t+2+i, and is taught by the target's row t+1+i.

        `outputs` are what the heads read; there is one head for all steps, or one for each.
        """
        conf = self.loss_conf
        weight, whole = row_weights(
            batch.answer, batch.document, steps=len(outputs), conf=conf, context=batch.context
        )
        # each step is moved to its teacher's row, so that all share one row of the target's logits
        moved = [later(output, 1 + i) for i, output in enumerate(outputs)]
        weights = [later(step, 1 + i) for i, step in enumerate(weight)]
        total, metrics = chunked_distillation(
            torch.stack(moved).flatten(1, 2),
            seen.teaches(),
            draft_heads=heads,
            target_head=self.head,
            weight=torch.stack(weights).flatten(1, 2),
            kept_ids=self.kept_ids,
            labels=sooner(batch.ids, 1).flatten(),
            conf=conf,
        )
        named = {
            f"{name}_{i + 1}": pair
            for name, steps in metrics.items()
            for i, pair in enumerate(steps)
        }
        return Loss(total=total, weight=whole, metrics=named)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is learned or chosen, by its published name."""
        return self.state_dict()

    def save(self, directory: Path, target: Target) -> None:
        dtype = target.head.weight.dtype
        tensors = {
            name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors().items()
        }
        metadata = checkpoint.metadata(target) | {"seed": str(self.seed)}
        config = self.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        checkpoint.save(directory, tensors, config=config, metadata=metadata)

    def restore(self, directory: Path, target: Target) -> None:
        """Read what `save` wrote. Raises UserError for another target, tokenizer or layout."""
        metadata = checkpoint.read_metadata(directory)
        checkpoint.check_fits(
            metadata,
            target_hash=target.fingerprint,
            tokenizer_hash=target.tokenizer_fingerprint,
        )
        if self.config.hidden_size != target.hidden_size:
            raise UserError(
                f"checkpoint: hidden size must be the target's {target.hidden_size}, "
                f"got {self.config.hidden_size}; choose the draft of this target"
            )
        tensors = checkpoint.load(directory, self.tensors())
        self.load_state_dict(tensors, strict=False)  # `load` was strict; what is left out is known
        self.seed = int(metadata["seed"]) if "seed" in metadata else None
        self.to(target.head.weight.device)


def layer_config(target: Target, architecture: str, **own: Any) -> LlamaConfig:
    """One Llama layer as wide as the target, as engines read it; `own` keys of a method win."""
    theirs = target.config
    rope = dict(architectures.ropes(theirs)["full_attention"])
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    shape = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim": target.head_size,
        "max_position_embeddings": theirs.max_position_embeddings,
        "rms_norm_eps": theirs.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    given = {key: value for key, value in own.items() if value is not None}
    return LlamaConfig(architectures=[architecture], **(shape | given))
