"""Console output of commands: bars and tables on a terminal, plain lines elsewhere."""

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from datetime import timedelta
from functools import cache, partial
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import track
from rich.table import Table
from rich.text import Text

# Accelerate is not set up yet, so the launcher's RANK tells which process is the main one.
IS_MAIN_PROCESS = os.environ.get("RANK", "0") == "0"
# Lines are printed as they are: a path may hold [brackets] or :colons:, which Rich would read as its own.
CONSOLE = Console(quiet=not IS_MAIN_PROCESS, markup=False, emoji=False)
SHOWS_BARS = CONSOLE.is_terminal and IS_MAIN_PROCESS
# Never breaks or colors a long line; the console of the bars, so that lines appear above them.
print_line = partial(CONSOLE.print, soft_wrap=True, highlight=False)
LOG_INTERVAL_S = 10.0  # between lines about the progress of long work, where no bar is shown
MIN_SHARE_TIMED = 0.01  # fewer items tell no pace: the first of a batch waits for all of it
PLAIN_WIDTH = 1000  # characters of a table's line that is not printed on a terminal
Item = TypeVar("Item")
log = logging.getLogger(__name__)
PACKAGES = ("conf", "data", "infer", "models", "train")


def build_aligned_table(
    columns: list[str], rows: list[list[str]], *, ruled: bool, label_columns: int = 1, no_wrap: bool = False
) -> Table:
    """Build a table of `label_columns` columns of text, then of numbers; `no_wrap` keeps each number on one line."""
    rules = box.SIMPLE_HEAD if ruled else None
    table = Table(box=rules, pad_edge=False, show_edge=False, collapse_padding=ruled, show_header=any(columns))
    for index, column in enumerate(columns):
        is_number = index >= label_columns
        justify = "right" if is_number else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=no_wrap and is_number)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table: ruled on a terminal, elsewhere in lines as long as their content."""
    console = CONSOLE if CONSOLE.is_terminal else Console(width=PLAIN_WIDTH, quiet=not IS_MAIN_PROCESS)
    console.print(build_aligned_table(columns, rows, ruled=CONSOLE.is_terminal), crop=False)


def track_progress(items: Iterable[Item], description: str, *, total: int | None = None) -> Iterable[Item]:
    """Return the items, and show on the main process how far the work on them is.

    A terminal shows a bar. Elsewhere work that takes longer than LOG_INTERVAL_S prints lines, with
    the time left if the number of items is known.
    """
    if SHOWS_BARS:
        return track(items, description, total=total, console=CONSOLE)
    if total is None and isinstance(items, Sized):
        total = len(items)
    return log_progress(items, description, total)


def log_progress(items: Iterable[Item], description: str, total: int | None) -> Iterator[Item]:
    """Yield the items; log a line between two of them when one is due."""
    start = last_line = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - last_line > LOG_INTERVAL_S:
            last_line = now
            count = f"{done:,}"
            if total is not None:
                left = timedelta(seconds=round((total - done) * (now - start) / done))
                count += f"/{total:,}" + (f"  {left} left" if done > max(1, MIN_SHARE_TIMED * total) else "")
            log.info("%s %s", description, count)
        yield item


@cache
def log_once(log: logging.Logger, line: str) -> None:
    """Log a line the first time: a command reads its data for a check, and again to use them."""
    log.info(line)


def setup_logging() -> None:
    """Configure logging: print this project's messages, and only the warnings of libraries.

    Call it before anything is built, so that the warning of a missing compiler is shown.
    """
    if CONSOLE.is_terminal:
        # That of the bars, so that lines appear above them; other processes show errors alone, and no bar.
        console = CONSOLE if IS_MAIN_PROCESS else Console()
        handler: logging.Handler = RichHandler(console=console, show_time=False, show_level=False, show_path=False)
    else:
        handler = logging.StreamHandler(sys.stdout)
        # The bars of downloads and of loading weights would become long lines. huggingface_hub
        # reads the variable when it is imported, and transformers asks huggingface_hub.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO if IS_MAIN_PROCESS else logging.ERROR)
