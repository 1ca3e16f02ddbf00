"""What commands say to people: a console for bars and tables, plain lines elsewhere."""

import logging
import os
import sys

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

CONSOLE = Console()
WIDE = 1000  # characters of a line that nobody looks at through a window
PACKAGES = ("conf", "data", "infer", "models", "train")


def aligned(
    columns: list[str], rows: list[list[str]], *, ruled: bool, labels: int = 1, whole: bool = False
) -> Table:
    """The first `labels` columns are words, the others figures; `whole` figures are never cut."""
    table = Table(box=box.SIMPLE_HEAD if ruled else None, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        figures = index >= labels
        justify = "right" if figures else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=whole and figures)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def say_table(columns: list[str], rows: list[list[str]]) -> None:
    """With a rule on a terminal; elsewhere lines that are as long as they must."""
    table = aligned(columns, rows, ruled=CONSOLE.is_terminal)
    CONSOLE.print(table, width=None if CONSOLE.is_terminal else WIDE, crop=False)


def speak() -> None:
    """Let this project's own loggers reach the reader; libraries keep to their warnings.

    Called before anything is built, so that a missing compiler is said: before Accelerate knows the
    processes, but after their launcher numbered them.
    """
    main_process = os.environ.get("RANK", "0") == "0"
    if CONSOLE.is_terminal:
        plain: logging.Handler = RichHandler(
            console=CONSOLE, show_time=False, show_level=False, show_path=False
        )
    else:
        plain = logging.StreamHandler(sys.stdout)
        disable_progress_bar()  # of weights being loaded: it would be one long line
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[plain], force=True)
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in PACKAGES:
            logger = logging.getLogger(name)
            logger.disabled = False  # by Hydra, which switches off every logger it finds
            logger.setLevel(logging.INFO if main_process else logging.ERROR)
