"""How far long work is: a bar on a terminal, a line every few seconds elsewhere."""

import logging
import time
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from models.console import CONSOLE

EVERY_S = 10.0  # between plain lines
log = logging.getLogger(__name__)


class Progress(RichProgress):
    """Rows done, their rate, failures and time left. `kept` were done by an earlier run."""

    def __init__(self, work: str, *, total: int | None, kept: int = 0):
        super().__init__(
            TextColumn(work), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
            console=CONSOLE, disable=not CONSOLE.is_terminal,
        )  # fmt: skip
        self.work, self.total, self.kept = work, total, kept
        self.done = self.failed = self.tokens = 0
        self.told = 0  # rows that the last line spoke of
        self.began = self.said = time.monotonic()
        self.bar = self.add_task("", total=total, completed=kept)
        if kept:
            log.info("%s: %s rows are there already", work, f"{kept:,}")

    def count(self, *, done: int = 0, tokens: int = 0, failed: int = 0) -> None:
        """So much more; said in turn."""
        self.done, self.tokens, self.failed = (
            self.done + done, self.tokens + tokens, self.failed + failed
        )  # fmt: skip
        self.update(self.bar, completed=self.kept + self.done, description=self._rates())
        if self.disable and time.monotonic() - self.said > EVERY_S:
            self.said = time.monotonic()
            self._say()

    def stop(self) -> None:
        """At the end, however short it was."""
        super().stop()
        if self.disable and self.done + self.failed > self.told:
            self._say()

    def _rates(self) -> str:
        """And the time left by them: rich's own looks at half a minute, a batch may take more."""
        spent = max(time.monotonic() - self.began, 1e-3)
        said = f"{self.done / spent:.1f} rows/s"
        said += f"  {self.tokens / spent:,.0f} tokens/s" if self.tokens else ""
        said += f"  {self.failed:,} failed" if self.failed else ""
        if self.total and self.done > min(self.total / 100, 100):  # a first row says nothing
            rest = max(self.total - self.kept - self.done - self.failed, 0)
            said += f"  {timedelta(seconds=round(rest * spent / self.done))} left"
        return said

    def _say(self) -> None:
        self.told = self.done + self.failed
        known = f"{self.kept + self.done:,}" + (f"/{self.total:,}" if self.total else "")
        log.info("%s %s  %s", self.work, known, self._rates())
