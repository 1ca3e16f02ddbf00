"""The order in which training visits the packed rows."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from models.errors import UserError


@dataclass(kw_only=True, frozen=True)
class Order:
    """Which rows a step trains on: a pure function of the step, so resuming needs nothing else.

    Every epoch visits each row once, in an order of its own. Batches are always full: one that
    meets the end of an epoch goes on with the next.
    """

    rows: int
    batch_size: int  # rows of an optimizer step, over all ranks and accumulated batches
    seed: int

    def batch(self, step: int, rank: int = 0, world: int = 1) -> list[int]:
        """Rows of this rank's share of the step."""
        if self.batch_size % world:
            raise UserError(
                "optim.batch_size: the rows of a step must be a multiple of the processes, "
                f"got {self.batch_size} for {world}"
            )
        visits = range(step * self.batch_size, (step + 1) * self.batch_size)[rank::world]
        return [
            int(_shuffled(self.rows, self.seed, visit // self.rows)[visit % self.rows])
            for visit in visits
        ]


@lru_cache(maxsize=4)
def _shuffled(rows: int, seed: int, epoch: int) -> np.ndarray:
    # a pair, not a sum: seed 1 must not repeat the epochs of seed 0
    return np.random.default_rng([seed, epoch]).permutation(rows)
