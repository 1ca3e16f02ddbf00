"""The options of methods with a vocabulary head for each token of a proposal."""

from dataclasses import dataclass
from typing import ClassVar

from models.drafts.config.base import DraftConf
from models.validation import at_least, check_values


@dataclass(kw_only=True)
class HeadsConf(DraftConf):
    """The options of methods with a head for each token of a proposal."""

    depth_key: ClassVar[str] = "heads"

    heads: int = 5  # one for each token of a proposal
    num_layers: int = 1  # residual blocks of each head

    def __post_init__(self) -> None:
        check_values(self, "draft", heads=at_least(1), num_layers=at_least(1))
