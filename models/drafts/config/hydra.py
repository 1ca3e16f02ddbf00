"""The options of Hydra (https://arxiv.org/abs/2402.05109)."""

from dataclasses import dataclass
from typing import ClassVar

from models.drafts.config.heads import HeadsConf
from models.validation import BELOW_ONE, check_values


@dataclass(kw_only=True)
class HydraConf(HeadsConf):
    """The options of Hydra; everything else follows from the target."""

    method: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "HydraModel"
    draft_class: ClassVar[str] = "models.drafts.hydra:HydraDraft"

    heads: int = 4  # one for each token of a proposal
    prefix: bool = True  # a decoder layer before the heads (Hydra++; the paper has 4 blocks)
    intermediate_size: int | None = None  # of the prefix layer; None = the target's
    dropout: float = 0.0  # share of the inputs of blocks and heads that training zeroes

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, "draft", dropout=BELOW_ONE)

    @property
    def needs_context(self) -> bool:
        """Return whether there is a prefix layer: only it reads other positions."""
        return self.prefix
