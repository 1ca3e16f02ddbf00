"""The time of each phase of the unfused round, and of the round as a whole."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

# in the order in which they run; steps.py has a function for each but the last
PHASES = ("verify", "accept", "cache_move", "draft", "host")


@dataclass(kw_only=True)
class PhaseTimer:
    """Seconds by phase, summed over rounds.

    Each phase ends by waiting for the device, so that it is charged with its own work. `wall_s` is
    measured separately, around whole rounds. `clock` returns seconds.
    """

    synchronize: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    wall_s: float = 0.0
    rounds: int = 0
    _round_start: float = 0.0
    _phase_start: float = 0.0

    def start_round(self) -> None:
        self._round_start = self._phase_start = self.clock()

    def end_phase(self, phase: str) -> None:
        """Charge the time since the last phase ended to `phase`."""
        self.synchronize()
        now = self.clock()
        self.seconds[phase] += now - self._phase_start
        self._phase_start = now

    def finish_round(self) -> None:
        """Count a round and add the time since it started."""
        self.wall_s, self.rounds = self.wall_s + self.clock() - self._round_start, self.rounds + 1
