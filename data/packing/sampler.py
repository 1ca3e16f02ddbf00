"""The order in which training visits the packed rows."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(kw_only=True, frozen=True)
class RowOrder:
    """The rows that each step trains on, as a pure function of the step (docs/packing.md, Order)."""

    num_rows: int
    rows_per_step: int  # of the optimizer, over all ranks and accumulated batches
    seed: int

    def step_rows(self, step: int, rank: int = 0, world: int = 1) -> list[int]:
        """Return this rank's share of the rows of a step."""
        assert self.rows_per_step % world == 0  # see check_parallel in train/distributed/build.py
        visits = range(step * self.rows_per_step, (step + 1) * self.rows_per_step)[rank::world]
        places = (divmod(visit, self.num_rows) for visit in visits)
        return [int(_shuffle_rows(self.num_rows, self.seed, epoch)[n]) for epoch, n in places]


@lru_cache(maxsize=4)
def _shuffle_rows(rows: int, seed: int, epoch: int) -> np.ndarray:
    # Seed and epoch are a pair, not a sum, because seed 1 must not repeat the epochs of seed 0.
    return np.random.default_rng([seed, epoch]).permutation(rows)
