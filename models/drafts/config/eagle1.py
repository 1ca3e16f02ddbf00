"""The options of EAGLE-1 (https://arxiv.org/abs/2401.15077) and HASS."""

from dataclasses import dataclass
from typing import ClassVar

from models.drafts.config.one_layer import OneLayerConf
from models.validation import at_least, check_values


@dataclass(kw_only=True)
class Eagle1Conf(OneLayerConf):
    """The options of EAGLE-1; everything else follows from the target."""

    method: ClassVar[str] = "eagle1"
    vllm_method: ClassVar[str | None] = "eagle"
    architecture: ClassVar[str] = "EagleLlamaForCausalLM"
    draft_class: ClassVar[str] = "models.drafts.eagle1:Eagle1Draft"

    ttt_steps: int = 1  # drafting steps in training; later ones read the draft's features (HASS)
    feature_loss_weight: float = 1.0  # weight of the feature loss
    token_loss_weight: float = 0.1  # weight of the token loss, which `loss` configures
    feature_noise: float = 0.2  # width of the uniform noise on the target's features in training

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(
            self,
            "draft",
            feature_loss_weight=at_least(0),
            token_loss_weight=at_least(0),
            feature_noise=at_least(0),
        )
