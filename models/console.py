"""What commands say to people: a console for bars on a terminal, plain lines elsewhere."""

import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler
from transformers.utils.logging import disable_progress_bar

CONSOLE = Console()
PACKAGES = ("conf", "data", "infer", "models", "train")


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
