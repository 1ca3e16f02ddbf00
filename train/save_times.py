"""Schedule of saved states: every few minutes or steps, and at steps that must be kept."""

import time
from dataclasses import dataclass, field

from train.distributed.parallel import Parallel


@dataclass(kw_only=True)
class SaveSchedule:
    """Schedule of saves, the same on all processes, by the clock of the main process."""

    parallel: Parallel
    minutes: float
    every_steps: int | None  # in place of the minutes
    multiple: int  # steps; by time, states are saved only at multiples of this
    required_steps: set[int]  # steps whose states are saved at any time
    overdue: bool = False
    saved_at: float = field(default_factory=time.perf_counter)

    def is_due(self, done: int) -> bool:
        """Return whether to save the state after `done` steps, by the last reading of the clock."""
        if done in self.required_steps:
            return True
        if self.every_steps is not None:
            return done % self.every_steps == 0
        return self.overdue and done % self.multiple == 0

    def read_clock(self) -> None:
        """Read the main process's clock: a collective, so not for every step."""
        if self.every_steps is None and not self.overdue:
            late = time.perf_counter() - self.saved_at >= 60 * self.minutes
            self.overdue = self.parallel.any_rank(self.parallel.is_main and late)

    def restart(self) -> None:
        """Restart the count: a state was saved."""
        self.overdue, self.saved_at = False, time.perf_counter()
