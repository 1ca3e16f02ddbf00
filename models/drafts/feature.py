"""The base of drafts that read a target's features: distillation, saving and loading.

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
from models.distill.loss_weights import row_weights, shift_left, shift_right
from models.distill.losses import LossConf, chunked_distillation_loss
from models.drafts.base import Batch, Draft, DraftConf, Loss
from models.errors import UserError
from models.target import architectures
from models.target.language_model import TargetOutput
from models.target.target import Target


@dataclass(kw_only=True)
class FeatureConf(DraftConf):
    """The configuration of a draft of one target; its seed determines the untrained draft."""

    def rebuild_untrained(self, draft: Draft, target: Target) -> Draft | str:
        """Rebuild the draft from its seed, or return why that is impossible."""
        assert isinstance(draft, FeatureDraft)
        if draft.seed is None:
            return "the checkpoint does not record its seed"
        return self.build(target, loss=draft.loss_conf, seed=draft.seed)


class FeatureDraft(Draft):
    """A draft that proposes several tokens from what the target computed at one position."""

    def __init__(self, config: Any, target: Target):
        super().__init__()
        self.config = config  # the content of config.json
        self.target_vocab: int = config.vocab_size
        self.loss_conf = LossConf()
        self.seed: int | None = None
        # The target owns these and they stay frozen; inside a tuple they are not submodules.
        self._frozen: tuple[nn.Embedding, nn.Linear] = (
            target.model.get_input_embeddings(),
            target.head,
        )

    @property
    def head(self) -> nn.Linear:
        """Return the frozen head of the target."""
        return self._frozen[1]

    def distill(
        self, outputs: list[Float[Tensor, "b t width"]], batch: Batch,
        target_output: TargetOutput, *, heads: list[Tensor],
    ) -> Loss:  # fmt: skip
        """Compute the loss of all steps: step i of row t proposes token t+2+i.

        Its target distribution is the target's at row t+1+i. `outputs` are the inputs of the heads;
        there is one head for all steps, or one for each.
        """
        conf = self.loss_conf
        row_weight, total_weight = row_weights(
            batch.answer_mask,
            batch.document_ids,
            steps=len(outputs),
            conf=conf,
            context_mask=batch.context_mask,
        )
        # Each step moves to the row of its target distribution, so that all steps share the logits.
        aligned = [shift_right(output, 1 + i) for i, output in enumerate(outputs)]
        weights = [shift_right(step_weight, 1 + i) for i, step_weight in enumerate(row_weight)]
        total, metrics = chunked_distillation_loss(
            torch.stack(aligned).flatten(1, 2),
            target_output.loss_inputs(),
            draft_heads=heads,
            target_head=self.head,
            weight=torch.stack(weights).flatten(1, 2),
            kept_ids=self.kept_ids,
            labels=shift_left(batch.input_ids, 1).flatten(),
            conf=conf,
        )
        named_metrics = {
            f"{name}_{i + 1}": sums
            for name, steps in metrics.items()
            for i, sums in enumerate(steps)
        }
        return Loss(total=total, weight=total_weight, metrics=named_metrics)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return all trained or chosen tensors by their published names."""
        return self.state_dict()

    def save(self, directory: Path, target: Target) -> None:
        """Save the tensors in the target's dtype, with config.json and the target's hashes."""
        dtype = target.head.weight.dtype
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.checkpoint_tensors().items()
        }
        metadata = checkpoint.build_metadata(target) | {"seed": str(self.seed)}
        config = self.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
        checkpoint.save_checkpoint(directory, tensors, config=config, metadata=metadata)

    def restore(self, directory: Path, target: Target) -> None:
        """Load what `save` wrote; raise UserError for another target, tokenizer or layout."""
        metadata = checkpoint.read_metadata(directory)
        checkpoint.check_metadata(
            metadata,
            target_hash=target.fingerprint,
            tokenizer_hash=target.tokenizer_fingerprint,
        )
        if self.config.hidden_size != target.hidden_size:
            raise UserError(
                f"checkpoint: hidden size must be the target's {target.hidden_size}, "
                f"got {self.config.hidden_size}; choose the draft of this target"
            )
        tensors = checkpoint.load_tensors(directory, self.checkpoint_tensors())
        self.load_state_dict(tensors, strict=False)  # `load_tensors` was strict already
        self.seed = int(metadata["seed"]) if "seed" in metadata else None
        self.to(target.head.weight.device)


def layer_config(target: Target, architecture: str, **overrides: Any) -> LlamaConfig:
    """Return the config of one Llama layer of the target's width in the layout that engines read.

    The `overrides` that are not None replace or extend the target's values.
    """
    target_config = target.config
    rope = dict(architectures.get_rope_parameters(target_config)["full_attention"])
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    defaults = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target_config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target_config.num_attention_heads,
        "num_key_value_heads": target_config.num_key_value_heads,
        "head_dim": target.head_size,
        "max_position_embeddings": target_config.max_position_embeddings,
        "rms_norm_eps": target_config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    fields = {key: value for key, value in overrides.items() if value is not None}
    return LlamaConfig(architectures=[architecture], **(defaults | fields))
