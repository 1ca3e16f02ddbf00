"""When a run saves its state: after so many minutes or steps, and at steps that must be kept."""

import time
from dataclasses import dataclass, field

from train.distributed.parallel import Parallel


@dataclass(kw_only=True)
class SaveTimes:
    """Decides alike on all processes, by the clock of the main one."""

    parallel: Parallel
    minutes: float
    every: int | None  # steps, in place of the minutes
    multiple: int  # of which a step must be one for its state to be saved by time
    always: set[int]  # steps whose states are saved at any time
    overdue: bool = False
    saved_at: float = field(default_factory=time.perf_counter)

    def due(self, done: int) -> bool:
        """Return whether to save the state after `done` steps, as of the last clock reading."""
        if done in self.always:
            return True
        if self.every is not None:
            return done % self.every == 0
        return self.overdue and done % self.multiple == 0

    def read_clock(self) -> None:
        """Ask the main process's clock. All processes together, so not in every step."""
        if self.every is None and not self.overdue:
            late = time.perf_counter() - self.saved_at >= 60 * self.minutes
            self.overdue = self.parallel.anywhere(self.parallel.main and late)

    def restart(self) -> None:
        """Count from now on: a state was saved."""
        self.overdue, self.saved_at = False, time.perf_counter()
