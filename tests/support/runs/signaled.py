"""Run a module that gets a signal while it writes: `signaled.py NUMBER PATTERN MODULE WORDS`.

The process sends it to itself before the rename that gives a file or folder its name, if the name
matches PATTERN, so that the moment does not depend on the clock.
"""

import os
import runpy
import sys
from fnmatch import fnmatch
from typing import Any


def send_at_rename(number: int, pattern: str) -> None:
    """Send a signal to this process at each rename to a name that matches."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and fnmatch(os.fspath(arguments[1]), pattern):
            os.kill(os.getpid(), number)

    sys.addaudithook(watch)


if __name__ == "__main__":
    _, number, pattern, module, *words = sys.argv
    sys.argv = [module, *words]
    send_at_rename(int(number), pattern)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
