"""Where a round's time goes: laps between the parts of the unfused round, and its wall time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

PARTS = ("verify", "accept", "cache_move", "draft", "host")


@dataclass(kw_only=True)
class Laps:
    """Seconds by part, summed over rounds.

    Each lap waits for the device, so that it is charged with its own work. `wall_s` is taken around
    whole rounds, by itself.
    """

    synchronize: Callable[[], None]
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    wall_s: float = 0.0
    rounds: int = 0
    _last: float = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """What was done since the lap before belongs to `part`."""
        self.synchronize()
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    def finish(self, wall_s: float) -> None:
        """A round is over, and took so long."""
        self.wall_s, self.rounds = self.wall_s + wall_s, self.rounds + 1
