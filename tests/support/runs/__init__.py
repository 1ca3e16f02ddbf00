"""Run Python in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_python(*words: str | Path, folder: Path = ROOT, timeout: float | None = None, **environment: str) -> str:
    """Run Python with these words in the folder and return what it prints; it must succeed."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert process.returncode == 0, f"{words}\n{process.stdout[-2000:]}\n{process.stderr[-8000:]}"
    return process.stdout


def run_module(name: str, *words: str | Path, **environment: str) -> Any:
    """Run a module of this package and return its last line, which is JSON."""
    lines = run_python("-W", "ignore", "-m", f"{__name__}.{name}", *words, **environment).splitlines()
    return json.loads(lines[-1])


def launch_script(name: str, *words: str | Path, processes: int) -> None:
    """Run a script of this package in several processes, by the launcher that users take."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    run_python(
        *launcher, Path(__file__).parent / name, *words, timeout=400, OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1"
    )
