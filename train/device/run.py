"""Run each stage in a process of its own, so that one that crashes or hangs stops nothing."""

import multiprocessing
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from threading import Thread

from data.chat.processes import exit_with_parent
from models.device.opening import open_device
from train.config.device_check import DeviceCheckConf
from train.device.checks import Check, CheckContext, Outcome, OutcomeFile, Result, run_checks

GRACE_S = 600.0  # for the check that runs when a stage's time is over: a large graph compiles for minutes
OPENING, CLOSING = "open the device", "close the device"
SEE_TEXT = "see the text above, and docs/trainium.md"


def run_stages(conf: DeviceCheckConf, file: Path) -> Iterator[list[Outcome]]:
    """Run the chosen stages in order; yield the outcomes of all checks so far after each."""
    for stage in conf.stages:
        run_stage(conf, stage, file)
        yield OutcomeFile(file).read_outcomes()


def run_stage(conf: DeviceCheckConf, stage: str, file: Path, *, package: str = "train.device") -> None:
    """Run a stage of the package; after a crash or a hang, go on behind that check in a new process."""
    outcomes, deadline = OutcomeFile(file), time.time() + 60 * conf.minutes
    while True:
        args = (conf, f"{package}.{stage}", stage, file, deadline)
        process = multiprocessing.get_context("spawn").Process(target=_run_checks, args=args)
        start = time.perf_counter()
        process.start()
        process.join(timeout=max(0.0, deadline - time.time()) + GRACE_S)
        if process.exitcode == 0:
            return
        is_hanging = process.is_alive()
        process.kill()
        process.join()
        # It failed in a check, or between or after its checks.
        _, name, remedy = outcomes.find_unfinished() or (stage, CLOSING, SEE_TEXT)
        why = "did not end in time" if is_hanging else f"ended the process with exit code {process.exitcode}"
        seconds = round(time.perf_counter() - start, 2)
        outcomes.end(Outcome(stage=stage, name=name, result=Result.FAIL, seconds=seconds, detail=why, remedy=remedy))
        if name in (OPENING, CLOSING):
            return


def _run_checks(conf: DeviceCheckConf, module: str, stage: str, file: Path, deadline: float) -> None:
    Thread(target=exit_with_parent, daemon=True).start()
    outcomes = OutcomeFile(file)
    opening = Check(name=OPENING, run=lambda: "", remedy=SEE_TEXT)
    outcomes.begin(stage, opening)
    context = CheckContext(conf=conf.device, device=open_device(conf.device), folder=file.parent)
    checks = import_module(module).list_checks(context)
    run_checks(stage, checks, outcomes, deadline=deadline)
