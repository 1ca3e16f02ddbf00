"""Run commands in processes of their own, side by side, each with its output in a log."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def run_logged(command: list[str], log: Path) -> tuple[int, int]:
    """Run a command on one thread with its output in a log; return its exit code and peak bytes.

    On Linux the peak is at least that of the caller, so the caller must load no model.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    print(log, flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, 1024 * usage.ru_maxrss


def run_side_by_side(tasks: Iterable[Callable[[], int]], jobs: int) -> None:
    """Do tasks that return exit codes, so many at a time; end the command if any has failed."""
    with ThreadPoolExecutor(jobs) as pool:
        codes = list(pool.map(lambda task: task(), tasks))
    if any(codes):
        failed = f"{sum(map(bool, codes))} of {len(codes)} processes failed"
        sys.exit(f"error: {failed}; see their logs, and call the command again")
