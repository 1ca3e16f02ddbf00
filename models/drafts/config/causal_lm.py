"""The options of a small language model that drafts for a large one."""

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from models.drafts.config.base import DraftConf
from models.drafts.config.lora import LoraConf
from models.errors import require
from models.target.config import ModelSource
from models.validation import at_least, check_values


class InitFrom(Enum):
    """The origin of the draft's weights before distillation."""

    checkpoint = "checkpoint"  # a pretrained model
    pruned = "pruned"  # embeddings, head and `layers` of the target
    random = "random"  # the shape of `pruned` with random weights


@dataclass(kw_only=True)
class CausalLMConf(ModelSource, DraftConf):
    """The model, its initial weights, and the part of it that is trained.

    Name, path and revision are those of a pretrained model, for `init_from=checkpoint`.
    """

    method: ClassVar[str] = "causal_lm"
    vllm_method: ClassVar[str | None] = "draft_model"
    architecture: ClassVar[str] = "a Hugging Face causal LM"
    draft_class: ClassVar[str] = "models.drafts.causal_lm:CausalLMDraft"
    is_language_model: ClassVar[bool] = True
    config_key: ClassVar[str] = "draft"

    init_from: InitFrom = InitFrom.checkpoint
    layers: list[int] | None = None  # of the target, if pruned or random; None = every fourth
    lora: LoraConf = field(default_factory=LoraConf)
    max_depth: int = 16  # tokens of the deepest proposal

    def __post_init__(self) -> None:
        require(
            self.init_from is not InitFrom.checkpoint or bool(self.name or self.path),
            "draft.name: must be set for draft.init_from=checkpoint, got nothing; "
            "give a hub name, or a local copy by draft.path=DIR",
        )
        require(
            self.init_from is not InitFrom.random or not self.lora.rank,
            f"draft.lora.rank: must be 0 for draft.init_from=random, got {self.lora.rank}; "
            "random weights must all be trained",
        )
        check_values(self, "draft", max_depth=at_least(1))

    @property
    def pretrained(self) -> ModelSource | None:
        """Return the model itself, unless it is cut out of the target."""
        return self if self.init_from is InitFrom.checkpoint else None

    @property
    def needs_context(self) -> bool:
        """Return False: the draft reads tokens and nothing of the target."""
        return False
