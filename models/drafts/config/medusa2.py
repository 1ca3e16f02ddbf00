"""The options of Medusa-2 (https://arxiv.org/abs/2401.10774)."""

from dataclasses import dataclass, field
from typing import ClassVar

from models.drafts.config.lora import LoraConf
from models.drafts.config.medusa import MedusaConf


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
