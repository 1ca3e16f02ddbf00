"""The settings of sampling, which target and draft share."""

import math
from dataclasses import asdict, dataclass, replace

from models.io.errors import POSITIVE, SEED, Rule, at_least, check_values

SAMPLING_RULES = {
    "temperature": Rule(
        "must be 0, or finite and at least 1e-5",  # Scores divided by less leave the range of the filters.
        lambda value: value == 0 or 1e-5 <= value < math.inf,
        "0 takes the likeliest token",
    ),
    "top_k": at_least(0, "0 keeps every token"),
    "top_p": Rule("must be in (0, 1]", lambda value: 0 < value <= 1, "1 keeps every token"),
    "min_p": Rule("must be in [0, 1]", lambda value: 0 <= value <= 1, "0 keeps every token"),
    "repetition_penalty": replace(POSITIVE, remedy="1 penalizes nothing"),
    "seed": SEED,
}


@dataclass(kw_only=True)
class SamplingConf:
    """The transformation of logits before a token is chosen, which target and draft share.

    Temperature 0 takes the likeliest token; other defaults do nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # least share of the likeliest token's probability
    repetition_penalty: float = 1.0  # divides the logits of tokens in prompt or answer
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    seed: int = 0

    graph_key = property(str)  # what compiled graphs depend on; see models/device/graph_budget.py

    def __post_init__(self) -> None:
        check_values(self, "sampling", **SAMPLING_RULES)

    @property
    def changes(self) -> dict[str, float]:
        """Return the options that are not at their defaults."""
        return {name: value for name, value in asdict(self).items() if value != getattr(SamplingConf, name)}

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0
