"""What tuning finds: what each shape is worth, what a round of it costs, which one to take."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.measure.intervals import Estimate
from infer.tuning.candidates import Shape
from infer.tuning.cost_model import CostCurve


@dataclass(kw_only=True)
class Worth:
    """What replay says of a shape; `kept` leaves out what is accepted behind the answer's end."""

    kept: float  # tokens of the answer a round: what a speed-up is made of
    tau: float  # acceptance length
    all_positions: float  # the same if rounds began at every token equally often


class Verdict(Enum):
    """Whether the best shape beats not speculating, by the interval of its measured speed-up."""

    pays = "pays"
    open = "not told apart from not speculating"
    loses = "does not pay"
    unmeasured = "was not measured: no answer took a round"

    @classmethod
    def of(cls, speedup: Estimate | None) -> "Verdict":
        if speedup is None:
            return cls.unmeasured
        low, high = speedup.ci95 or (-np.inf, np.inf)
        return cls.pays if low > 1 else cls.loses if high < 1 else cls.open


@dataclass(kw_only=True)
class Cell:
    """The answer for one draft, batch and context.

    `pick` is what is likelier the faster, however sure: `best`, or None for not speculating.
    """

    draft: str
    batch: int
    context: int
    token_s: float  # of the target alone, whatever rows share its steps
    curve: CostCurve
    pick: Shape | None
    best: Shape  # of those that speculate
    speedups: dict[str, Estimate | None]  # measured, of those that were decoded with
    of_best: dict[str, Estimate | None]  # speed of `best` over theirs, prompt by prompt

    @property
    def verdict(self) -> Verdict:
        return Verdict.of(self.speedups[self.best.name])


@dataclass(kw_only=True)
class Tuned:
    """One draft: what its shapes are worth anywhere, and the choice for each batch and context."""

    name: str
    directory: Path
    shapes: list[Shape]
    worth: dict[str, Worth]
    acceptance: Float[ndarray, "depth ranks"]
    cells: list[Cell] = field(default_factory=list)

    def predicted(self, cell: Cell, one: Shape) -> float:
        """Speed-up."""
        return self.worth[one.name].kept / cell.curve.steps(one)
