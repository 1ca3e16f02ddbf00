"""Report the progress of long work: a bar on a terminal, a log line every few seconds elsewhere."""

import logging
import time
from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from models.console import CONSOLE, LOG_INTERVAL_S, SHOWS_BARS

log = logging.getLogger(__name__)


class RowProgress(RichProgress):
    """A progress bar with the rate of rows and tokens, the failures and the time left.

    `already_done` rows were done by an earlier run and do not count for the rates. Before the first
    rows are done, the prompts read and the tokens so far are shown, and once these are more than a
    token a prompt the time that is left if each row takes `longest` tokens.
    """

    def __init__(
        self, label: str, *, total: int | None, already_done: int = 0, longest: int | None = None
    ):
        super().__init__(
            TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
            console=CONSOLE, disable=not SHOWS_BARS,
        )  # fmt: skip
        self.label, self.total, self.already_done = label, total or 0, already_done
        self.longest = longest
        self.done = self.failed = self.tokens = self.prompts = 0
        self.rows_logged = 0  # done and failed rows as of the last log line
        self.start_time = self.last_log_time = time.monotonic()
        self.bar = self.add_task("", total=total, completed=already_done)
        if self.disable and total and longest:
            log.info("%s: reading the first prompts of %s rows", label, f"{self.total:,}")
        if already_done:
            log.info("%s: %s rows are already done", label, f"{already_done:,}")

    def count(self, *, done: int = 0, tokens: int = 0, failed: int = 0, prompts: int = 0) -> None:
        """Add to the counts and refresh the bar, or log a line when one is due."""
        self.done, self.tokens, self.failed, self.prompts = (
            self.done + done, self.tokens + tokens, self.failed + failed, self.prompts + prompts
        )  # fmt: skip
        self.update(
            self.bar, completed=self.already_done + self.done, description=self._format_rates()
        )
        if self.disable and time.monotonic() - self.last_log_time > LOG_INTERVAL_S:
            self.last_log_time = time.monotonic()
            self._log_line()

    def stop(self) -> None:
        """Stop the bar; without a terminal, log a last line if counts have changed since."""
        super().stop()
        if self.disable and self.done + self.failed > self.rows_logged:
            self._log_line()

    def _format_rates(self) -> str:
        """Return the rates, the failures and the time left as one text.

        The estimate covers the whole run: rich's own averages over 30 s, and one batch may take
        longer than that.
        """
        elapsed = max(time.monotonic() - self.start_time, 1e-3)  # avoids dividing by 0
        rows_left = max(self.total - self.already_done - self.done - self.failed, 0)
        has_estimate = 0 < min(self.total / 100, 100) < self.done  # a few rows say too little
        left = ""
        if has_estimate:
            left = f"{timedelta(seconds=round(rows_left * elapsed / self.done))} left"
        elif self.total and self.longest and self.tokens > self.prompts:
            tokens_left = max((self.total - self.already_done) * self.longest - self.tokens, 0)
            left = (
                f"{timedelta(seconds=round(tokens_left * elapsed / self.tokens))} left if answers "
                f"take {self.longest:,} tokens each"
            )
        rates = [
            f"{self.done / elapsed:.1f} rows/s" if self.done or not self.prompts
            else f"{self.prompts:,} prompts read, {self.tokens:,} tokens so far",
            f"{self.tokens / elapsed:,.0f} tokens/s" if self.tokens else "",
            f"{self.failed:,} failed" if self.failed else "",
            left,
        ]  # fmt: skip
        return "  ".join(filter(None, rates))

    def _log_line(self) -> None:
        self.rows_logged = self.done + self.failed
        rows = f"{self.already_done + self.done:,}" + (f"/{self.total:,}" if self.total else "")
        log.info("%s %s  %s", self.label, rows, self._format_rates())
