"""How far a capture is: a bar on a terminal, else a line every so often."""

import logging
import time
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from models.console import CONSOLE

log = logging.getLogger(__name__)
EVERY_S = 30
MB = 10**6


class Pace:
    """Tokens done, tokens a second, time left, bytes written."""

    def __init__(self, *, tokens: int):
        self.tokens, self.done, self.bytes = tokens, 0, 0
        self.start = self.said = time.monotonic()
        self.bar = Progress(
            TextColumn("capture"), BarColumn(), TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(), console=CONSOLE, disable=not CONSOLE.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("capture", total=tokens, words="")

    def __enter__(self) -> "Pace":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.bar.stop()
        if error is None:
            log.info("capture: %s", self)

    def step(self, tokens: int) -> None:
        """So many tokens more were looked at."""
        self.done += tokens
        self.bar.update(self.task, completed=self.done, words=str(self))
        if not CONSOLE.is_terminal and time.monotonic() - self.said > EVERY_S:
            self.said = time.monotonic()
            left = (self.tokens - self.done) / self.rate
            log.info("capture: %s, %d s left", self, left)

    def wrote(self, size: int) -> None:
        """So many bytes more are on disk."""
        self.bytes += size

    @property
    def rate(self) -> float:
        """Tokens a second, writing included."""
        return self.done / (time.monotonic() - self.start)

    def __str__(self) -> str:
        return (
            f"{self.done:,} of {self.tokens:,} tokens, {self.rate:,.0f} tokens/s, "
            f"{self.bytes / MB:,.1f} MB written"
        )
