"""The options of Medusa-2 (https://arxiv.org/abs/2401.10774)."""

from dataclasses import dataclass, field
from typing import ClassVar

from models.drafts.config.base import FirstStage
from models.drafts.config.lora import LoraConf
from models.drafts.config.medusa import MedusaConf
from models.errors import require
from models.validation import POSITIVE, at_least, check_values


@dataclass(kw_only=True)
class Medusa2Conf(MedusaConf):
    """The options of Medusa-1, of the adapters, and of the two loss terms."""

    method: ClassVar[str] = "medusa2"
    trains_target: ClassVar[bool] = True
    draft_class: ClassVar[str] = "models.drafts.medusa2:Medusa2Draft"

    lora: LoraConf = field(default_factory=lambda: LoraConf(rank=32, alpha=16.0))
    keep_weight: float = 1.0  # of the distance to the original target
    heads_weight: float = 0.2  # of the loss of the heads
    heads_warmup: int = 40  # optimizer steps over which `heads_weight` rises; 0 = no ramp
    heads_lr_scale: float = 4.0  # learning rate of the heads / learning rate of the adapters
    heads_steps: int | None = None  # steps of a first stage, which trains the heads alone
    heads_epochs: float | None = None  # passes of that stage, in place of steps; both null = none

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "draft", heads_steps=at_least(1), heads_epochs=POSITIVE)
        require(
            self.heads_steps is None or self.heads_epochs is None,
            "draft.heads_epochs: must be null if draft.heads_steps is set, got "
            f"{self.heads_epochs} and {self.heads_steps} steps; set one of them to null",
        )

    @property
    def first_stage(self) -> FirstStage | None:
        """Return the training of the heads alone on the target as it is, or None without one."""
        if self.heads_steps is None and self.heads_epochs is None:
            return None
        heads = MedusaConf(
            heads=self.heads, num_layers=self.num_layers, separate_lm_heads=self.separate_lm_heads
        )
        return FirstStage(
            draft=heads, steps=self.heads_steps, epochs=self.heads_epochs,
            lr_scale=self.heads_lr_scale,
        )  # fmt: skip
