"""The options of low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685)."""

from dataclasses import dataclass, replace

from models.validation import POSITIVE, at_least, check_values


@dataclass(kw_only=True)
class LoraConf:
    """Adapters of every linear layer but the head; rank 0 adds none."""

    rank: int = 0
    alpha: float = 32.0  # the adapter's output is scaled by alpha / rank

    def __post_init__(self) -> None:
        check_values(
            self, "draft.lora", rank=at_least(0, "0 trains every weight"),
            alpha=replace(POSITIVE, remedy="e.g. 32"),
        )  # fmt: skip
