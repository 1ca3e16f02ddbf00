"""The base of drafts that read a target's features: building, distillation, saving and loading.

Axes: B rows, T tokens, H hidden.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig

from models.batch import Batch
from models.checkpoints import checkpoint, checkpoint_files
from models.drafts.base import Draft, DraftState, HeadTerm, LossTerms, Needs, require_no_bias
from models.drafts.options import DraftConf
from models.io.errors import UserError, first_line, require
from models.losses.config import LossConf
from models.losses.loss_weights import position_weights, shift_left, shift_right
from models.parallel.dtensor import full_tensor
from models.targets import architectures
from models.targets.language_model import TargetOutput
from models.targets.target import Target

# The types of rotary positions that engines read of a draft, and the keys of each.
ROPE_KEYS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
DEFAULT_ROPE_THETA = 10_000.0  # Llama's


class FeatureDraft(Draft):
    """A draft that reads hidden states of the target, at one position or at all."""

    config_class: ClassVar[Callable[..., Any]] = LlamaConfig  # holds the content of config.json
    config_keys: ClassVar[dict[str, str]]  # for each option of a checkpoint its key in config.json

    def __init__(self, conf: DraftConf, config: Any, target: Target):
        super().__init__()
        self.conf: Any = conf
        self.method = conf.method
        self.max_depth = self.trained_depth = conf.max_proposal_depth
        self.needs = Needs(layers=[], hidden=True, context=conf.needs_context)
        self.config = config  # the content of config.json
        self.target_vocab: int = config.vocab_size
        # The target owns these and they stay frozen; inside a tuple they are not submodules.
        self._frozen: tuple[Any, nn.Linear] = (target.model, target.head)

    @classmethod
    def engine_config(cls, conf: Any, target: Target, **overrides: Any) -> Any:
        """Build the content of config.json as engines read it; a method passes `overrides`."""
        options = {key: getattr(conf, option) for option, key in cls.config_keys.items()}
        return layer_config(target, conf.architecture, **(options | overrides))

    @classmethod
    def default_keys(cls, target: Target) -> dict[str, Any]:
        """Return the keys of config.json that drafts published elsewhere may lack."""
        return {}

    @classmethod
    def fields_from_config(cls, config: Any) -> dict[str, Any]:
        """Return the options that `engine_config` wrote to config.json."""
        return {option: getattr(config, key) for option, key in cls.config_keys.items()}

    @classmethod
    def build(cls, conf: Any, target: Target, *, loss: LossConf, seed: int) -> "FeatureDraft":
        """Build a new draft: random weights, and those that it takes over from the target."""
        if cls.reads_target_head:
            require_no_bias(target.head, conf.method)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = cls(conf, cls.engine_config(conf, target), target)
        draft.loss_conf, draft.seed = loss, seed
        draft.copy_target_weights(target)
        return draft

    @classmethod
    def load(cls, directory: Path, target: Target) -> "FeatureDraft":
        _, recorded_seed = checkpoint.read_origin(directory, target)
        keys = cls.default_keys(target) | checkpoint_files.read_config(directory)
        try:
            config = cls.config_class(**keys)
            conf = cls.conf_class(**cls.fields_from_config(config))
        except (AttributeError, StrictDataclassError, TypeError, ValueError) as error:
            raise UserError(
                f"checkpoint: config.json must have the keys and values of a {cls.conf_class.method} draft, got "
                f"{directory}: {first_line(error)}; take the file as it was published"
            ) from error
        require(
            config.hidden_size == target.hidden_size,
            f"checkpoint: hidden size must be the target's {target.hidden_size}, "
            f"got {config.hidden_size}; choose the draft of this target",
        )
        share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
        require(
            share == 1.0,
            f"checkpoint: its layer must rotate whole heads, got partial_rotary_factor={share} in "
            f"{directory}; remove the key from config.json if this project trained the draft",
        )
        draft = cls(conf, config, target)
        draft.seed = recorded_seed
        draft.take_tensors(checkpoint.load_tensors(directory, draft.checkpoint_tensors()))
        return draft.convert_weights(target)

    def rebuild_untrained(self, target: Target) -> Draft | str:
        if self.seed is None:
            return "the checkpoint does not record its seed"
        untrained = self.build(self.conf, target, loss=self.loss_conf, seed=self.seed)
        if self.kept_ids is not None:
            untrained.copy_target_weights(target, self.kept_ids)
        return untrained.convert_weights(target)

    @property
    def head(self) -> nn.Linear:
        """Return the frozen head of the target."""
        return self._frozen[1]

    @property
    def target_embeddings(self) -> Any:
        """Return the module of the target's frozen embeddings, whose `weight` a tensor group may share."""
        return self._frozen[0].get_input_embeddings()

    def copy_target_weights(self, target: Target, kept_ids: Int[Tensor, " draft_vocab"] | None = None) -> None:
        """Copy what a new draft takes from the target; `kept_ids` is the draft's vocabulary."""

    def distill(
        self,
        outputs: list[Float[Tensor, "b t width"]],
        batch: Batch,
        target_output: TargetOutput,
        *,
        heads: list[Tensor],
        scale: Tensor | float = 1.0,
    ) -> LossTerms:
        """Return the loss of all steps: step i of position t proposes token t+2+i.

        It is compared with the target's distribution at position t+1+i. `outputs` are the inputs of
        the heads; there is one head for all steps, or one for each. `scale` is that of the term in the loss.
        """
        weights_by_step, total_weight = position_weights(batch, steps=len(outputs), conf=self.loss_conf)
        # Each step moves to the position of its target distribution, so that all steps share the
        # target's logits.
        aligned = [shift_right(output, 1 + i) for i, output in enumerate(outputs)]
        weights = [shift_right(step_weight, 1 + i) for i, step_weight in enumerate(weights_by_step)]
        term = HeadTerm(
            draft_hidden=torch.stack(aligned).flatten(1, 2),
            target_hidden_or_topk=target_output.loss_inputs(),
            draft_heads=heads,
            target_head=self.head,
            weight=torch.stack(weights).flatten(1, 2),
            kept_ids=self.kept_ids,
            labels=shift_left(batch.input_ids, 1).flatten(),
            conf=self.loss_conf,
            scale=scale,
        )
        return LossTerms(weight=total_weight, heads=[term])

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by their published names; collective where some are the target's."""
        return self.state_dict()

    def save(self, directory: Path, target: Target, *, writes: bool = True) -> None:
        tensors = self.checkpoint_tensors()
        if writes:
            checkpoint.save_draft(directory, tensors, target=target, seed=self.seed, config=self.config.to_dict())

    def take_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the weights from the tensors of a checkpoint."""
        self.load_state_dict(tensors, strict=False)  # `load_tensors` was strict already


class HeadsDraft(FeatureDraft):
    """A draft with vocabulary heads, which start as the target's head."""

    @classmethod
    def fields_from_config(cls, config: Any) -> dict[str, Any]:
        """Return the options that `engine_config` wrote to config.json; publishers leave one out."""
        separate = not getattr(config, "original_lm_head", False)
        return super().fields_from_config(config) | {"separate_lm_heads": separate}

    @property
    def heads(self) -> list[nn.Linear]:
        """Return the vocabulary heads: a shared one, or one for each depth."""
        raise NotImplementedError

    def list_loss_heads(self) -> list[nn.Linear]:
        return self.heads if self.conf.trains_heads else []

    def head_of(self, level: int) -> nn.Linear:
        """Return the vocabulary head of a level of the tree, counted from 0."""
        return self.heads[min(level, len(self.heads) - 1)]

    @property
    def dtype(self) -> torch.dtype:
        return self.heads[0].weight.dtype

    def copy_target_weights(self, target: Target, kept_ids: Int[Tensor, " draft_vocab"] | None = None) -> None:
        """Copy the target's head to all heads; they have no bias, so that one that is shared must have none."""
        if not self.conf.separate_lm_heads:
            require_no_bias(target.head, f"{self.method} with draft.separate_lm_heads=false")
        for head in self.heads:
            head.load_state_dict({"weight": full_tensor(target.head.weight)})

    def passes(self, depth: int) -> int:
        """Return at most 1: a proposal reads each weight once, as each depth has its own head."""
        return min(depth, 1)

    def new_state(self, batch: int, slots: int) -> DraftState:
        return {"hidden": self.heads[0].weight.new_zeros(batch, self.config.hidden_size)}


def layer_rope(target_config: Any) -> dict[str, Any]:
    """Return the rotary parameters that the layer computes with, close to those of the target.

    A Llama layer rotates all of a head, and knows the keys of ROPE_KEYS alone: others, such as the
    share of a head that the target rotates, would be believed by an engine.
    """
    rope = architectures.get_rope_parameters(target_config)["full_attention"]
    kind = rope.get("rope_type", "default")
    kind = kind if kind in ROPE_KEYS else "default"
    base = {"rope_type": kind, "rope_theta": rope.get("rope_theta", DEFAULT_ROPE_THETA)}
    return base | {key: rope[key] for key in ROPE_KEYS[kind]}


def layer_config(target: Target, architecture: str, **overrides: Any) -> LlamaConfig:
    """Return the config of one Llama layer of the target's width in the layout that engines read.

    The `overrides` that are not None replace or extend the target's values. Raise UserError for a
    target whose values no such layer can have.
    """
    target_config, family = target.config, target.config.model_type
    keys = {
        "architectures": [architecture],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": getattr(target_config, "intermediate_size", None),
        "num_hidden_layers": 1,
        "num_attention_heads": target_config.num_attention_heads,
        "num_key_value_heads": target_config.num_key_value_heads,
        "head_dim": target.head_size,
        "max_position_embeddings": target_config.max_position_embeddings,
        "rms_norm_eps": architectures.get_norm_epsilon(target_config),
        "rope_parameters": layer_rope(target_config),
        "tie_word_embeddings": False,
        **{key: value for key, value in overrides.items() if value is not None},
    }
    require(
        isinstance(keys["intermediate_size"], int),
        f"draft.intermediate_size: must be set for a target of {family}, which has no single one, "
        f"got {keys['intermediate_size']}; set it to a multiple of the hidden size",
    )
    require(
        keys["hidden_size"] % keys["num_attention_heads"] == 0,
        "draft.heads: the attention heads must divide the hidden size, got "
        f"{keys['num_attention_heads']} and {keys['hidden_size']} of {family}; set draft.heads and "
        "draft.kv_heads of an EAGLE draft, or choose a Medusa draft",
    )
    require(
        keys["num_attention_heads"] % keys["num_key_value_heads"] == 0,
        "draft.kv_heads: must divide the attention heads, got "
        f"{keys['num_key_value_heads']} and {keys['num_attention_heads']}; set draft.kv_heads to a divisor",
    )
    return LlamaConfig(**keys)
