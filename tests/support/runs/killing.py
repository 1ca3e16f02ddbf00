"""Kill a run with SIGKILL at a chosen moment."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from models.io.files import PARTIAL_SUFFIX
from tests.support.runs import ROOT

TIMEOUT_S = 300
FORKS = multiprocessing.get_context("forkserver")  # its processes have these modules imported:
FORKS.set_forkserver_preload(["data.preparation", "tests.support.data.openai_server"])


def start_toy_process(
    folder: Path,
    changes: dict,
    *,
    stderr: int | None = None,
    signal_at: tuple[signal.Signals, str] | None = None,
    **environment: str,
) -> subprocess.Popen:
    """Start `toy_run.py` in a separate process with a single thread.

    `signal_at`: a signal that it gets before it renames a file to a name that matches this pattern.
    """
    signaled = ["tests.support.runs.signaled", *map(str, signal_at)] if signal_at else []
    return subprocess.Popen(
        [sys.executable, "-m", *signaled, "tests.support.runs.toy_run", folder, json.dumps(changes)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
    )


def partials(folder: Path) -> list[Path]:
    """List partial files of the state and of the checkpoint."""
    return [*folder.glob(f"state/*{PARTIAL_SUFFIX}"), *folder.glob(f"checkpoint/*{PARTIAL_SUFFIX}")]


def newest_step(folder: Path) -> int:
    steps = [int(p.name) for p in folder.glob("state/*") if p.suffix != PARTIAL_SUFFIX]
    return max(steps, default=0)


def kill_while_saving(folder: Path, changes: dict, *, step: int) -> None:
    """Start or continue a run that is killed while it writes the state of this step."""
    at = (signal.SIGKILL, f"*/state/{step:08}")
    assert start_toy_process(folder, changes, signal_at=at).wait(timeout=TIMEOUT_S) == -9
    assert partials(folder)


def kill(folder: Path, changes: dict, *, when: Callable[[], bool]) -> None:
    """Start or continue a run and kill it as soon as `when` holds."""
    run = start_toy_process(folder, changes)
    wait_for_moment(run, when)
    run.kill()
    assert run.wait() == -9


def wait_for_moment(run: subprocess.Popen, when: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not when():
        assert run.poll() is None, "the run ended before its moment came"
        assert time.monotonic() < deadline
        time.sleep(2e-4)


def finish(folder: Path, changes: dict) -> None:
    assert start_toy_process(folder, changes).wait(timeout=TIMEOUT_S) == 0


@contextmanager
def launcher(
    folder: Path,
    changes: dict,
    *,
    processes: int,
    restarts: int,
    meeting: Sequence[str] = ("--standalone",),
    node: int = 0,
    **environment: str,
) -> Iterator[subprocess.Popen]:
    """Run `toy_run.py` by torchrun, which must succeed. Launchers of several nodes need a `meeting` point."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meeting,
        f"--nproc_per_node={processes}",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
        ROOT / "tests/support/runs/toy_run.py",
        folder,
        json.dumps(changes),
    ]
    process_environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    log = folder.with_suffix(f".{node}.log")
    with log.open("w") as output:
        run = subprocess.Popen(command, env=process_environment, stdout=output, stderr=output)
        try:
            yield run
            assert run.wait(timeout=2 * TIMEOUT_S) == 0, log.read_text()
        finally:
            run.terminate()  # its workers end with it
            run.wait()


def kill_worker(run: subprocess.Popen, rank: int, *, when: Callable[[], bool]) -> None:
    """Kill a worker of a launcher as soon as `when` holds; wait until the launcher has ended the others."""
    wait_for_moment(run, when)
    before = psutil.Process(run.pid).children()
    before[rank].kill()
    psutil.wait_procs(before, timeout=TIMEOUT_S)
