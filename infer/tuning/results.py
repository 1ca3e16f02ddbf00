"""Results of tuning: expected tokens, measured speed-ups and the choice for each setting."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.measure.intervals import Estimate
from infer.tuning.candidates import TreeCandidate
from infer.tuning.cost_model import CostCurve


@dataclass(kw_only=True)
class ExpectedTokens:
    """The tokens a round of a candidate, estimated by replay."""

    kept: float  # delivered tokens a round, without those after the answer's end
    tau: float  # acceptance length
    all_positions: float  # acceptance length if rounds began at every token equally often


class TuningVerdict(Enum):
    """The comparison of the best candidate with no speculation, by its speed-up's interval."""

    pays = "pays"
    open = "not told apart from not speculating"
    loses = "does not pay"
    unmeasured = "was not measured: no answer took a round"

    @classmethod
    def from_speedup(cls, speedup: Estimate | None) -> "TuningVerdict":
        """Return the verdict on a measured speed-up."""
        if speedup is None:
            return cls.unmeasured
        low, high = speedup.ci95 or (-np.inf, np.inf)
        return cls.pays if low > 1 else cls.loses if high < 1 else cls.open


@dataclass(kw_only=True)
class TuningResult:
    """The result for one draft, batch size and context.

    `pick` is the faster point estimate, regardless of its interval: `best`, or None for no
    speculation.
    """

    draft: str
    batch: int
    context: int
    token_s: float  # seconds a token of the target alone; rows in a batch share a step's time
    cost_curve: CostCurve
    pick: TreeCandidate | None
    best: TreeCandidate  # the best candidate, even if it is slower than no speculation
    speedups: dict[str, Estimate | None]  # of the measured candidates, over no speculation
    best_over_each: dict[str, Estimate | None]  # speed of `best` over theirs, paired by prompt

    @property
    def verdict(self) -> TuningVerdict:
        """Return the verdict on the best candidate's measured speed-up."""
        return TuningVerdict.from_speedup(self.speedups[self.best.name])


@dataclass(kw_only=True)
class DraftTuning:
    """One draft's candidates with their expected tokens, and a result for each batch and context.

    Expected tokens do not depend on batch and context.
    """

    name: str
    directory: Path
    candidates: list[TreeCandidate]
    expected_tokens: dict[str, ExpectedTokens]
    acceptance: Float[ndarray, "depth ranks"]
    results: list[TuningResult] = field(default_factory=list)

    def predicted_speedup(self, result: TuningResult, candidate: TreeCandidate) -> float:
        """Predict a candidate's speed-up: its expected tokens over the cost of its round."""
        return self.expected_tokens[candidate.name].kept / result.cost_curve.steps(candidate)
