"""The options of the EAGLE methods: one decoder layer that drafts from the target's features."""

from dataclasses import dataclass

from models.drafts.config.base import DraftConf
from models.validation import BELOW_ONE, at_least, check_values


@dataclass(kw_only=True)
class OneLayerConf(DraftConf):
    """The options of all one-layer methods; everything else follows from the target."""

    max_depth: int = 16  # tokens of the deepest proposal
    ttt_steps: int = 7  # drafting steps in training
    intermediate_size: int | None = None  # None = the target's
    heads: int | None = None  # None = the target's
    kv_heads: int | None = None  # None = the target's
    head_size: int | None = None  # None = the target's
    dropout: float = 0.0  # share of the layer's inputs that training zeroes

    def __post_init__(self) -> None:
        check_values(self, "draft", ttt_steps=at_least(1), max_depth=at_least(1), dropout=BELOW_ONE)
