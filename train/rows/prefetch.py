"""Build the next step's input in a thread while the current step runs."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Builder of each step's input by `make`: one step `early`, or when it is taken.

    `wait_seconds`: how long the run has waited for it since this was last set to 0.
    """

    def __init__(self, make: Callable[[int], Item], *, steps: int, early: bool):
        self.make, self.steps, self.early = make, steps, early
        self.wait_seconds = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._next: Future[Item] | None = None

    def take(self, step: int) -> Item:
        """Return the input of this step; raise what `make` raised."""
        began = time.perf_counter()
        item = self._next.result() if self._next else self.make(step)
        self.wait_seconds += time.perf_counter() - began
        has_next = self.early and step + 1 < self.steps
        self._next = self._thread.submit(self.make, step + 1) if has_next else None
        return item

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
