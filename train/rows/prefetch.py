"""What the next step learns from, made ready by a thread while this step is taken."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Calls `make` for each step of a run in turn: one step `early`, or when it is taken.

    `waited`: seconds that the run had to wait for it, since they were last set to 0.
    """

    def __init__(self, make: Callable[[int], Made], *, steps: int, early: bool):
        self.make, self.steps, self.early = make, steps, early
        self.waited = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._next: Future[Made] | None = None

    def take(self, step: int) -> Made:
        """Of this step. Raises what `make` raised."""
        began = time.perf_counter()
        found = self._next.result() if self._next else self.make(step)
        self.waited += time.perf_counter() - began
        follows = self.early and step + 1 < self.steps
        self._next = self._thread.submit(self.make, step + 1) if follows else None
        return found

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
