"""Run the checks of a stage one after the other, whatever becomes of the others, and record their outcomes.

A check is a function with a remedy. It returns what it measured, and raises if the device failed.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from models.device.config import DeviceConf
from models.device.cpu import CpuDevice
from models.device.device import Device
from models.io.console import print_line

MAX_DETAIL = 300  # characters of an error


class Result(StrEnum):
    """The result of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    ABSENT = "ABSENT"  # an operator that the device lacks and that no graph of ours has
    SKIP = "SKIP"  # not run, for the reason in `detail`


class CheckFailedError(Exception):
    """The device computed something else than it should have."""


class CheckSkippedError(Exception):
    """The check cannot run on this machine."""


def confirm(is_right: bool, measured: str) -> str:
    """Return what a check has measured; raise CheckFailedError with it if it is not right."""
    if not is_right:
        raise CheckFailedError(measured)
    return measured


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that a device should do."""

    name: str
    run: Callable[[], str]  # returns what was measured
    remedy: str
    is_needed: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a check with what it measured, as files and pages have it."""

    stage: str
    name: str
    result: str
    seconds: float
    detail: str
    remedy: str = ""  # of a check that failed


@dataclass(kw_only=True)
class CheckContext:
    """The device under test, a CPU to compare it with (eager, fp32), and an empty folder."""

    device: Device
    folder: Path
    conf: DeviceConf = field(default_factory=DeviceConf)  # that the device was opened by
    reference: Device = field(
        default_factory=lambda: CpuDevice(
            name="cpu", torch_device=torch.device("cpu"), dtype=torch.float32, compiles=False
        )
    )

    @property
    def accelerators(self) -> int:
        """Return the number of processes that can have a device of their own; those of a CPU share it."""
        if self.device.name in ("cpu", "xla"):
            return 4
        return torch.accelerator.device_count()


class OutcomeFile:
    """The file of outcomes: a line when a check begins, and one when it has ended."""

    def __init__(self, path: Path):
        self.path = path

    def read_outcomes(self) -> list[Outcome]:
        return [Outcome(**line) for line in self._read_lines() if "result" in line]

    def find_unfinished(self) -> tuple[str, str, str] | None:
        """Return stage, name and remedy of the check that has begun and not ended, or None."""
        lines = self._read_lines()
        if not lines or "result" in lines[-1]:
            return None
        return lines[-1]["stage"], lines[-1]["name"], lines[-1]["remedy"]

    def begin(self, stage: str, check: Check) -> None:
        self._append({"stage": stage, "name": check.name, "remedy": check.remedy})

    def end(self, outcome: Outcome) -> None:
        """Record and print an outcome."""
        self._append(dataclasses.asdict(outcome))
        print_line(format_outcome(outcome))

    def _append(self, line: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read_lines(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def format_outcome(outcome: Outcome) -> str:
    """Return the line of an outcome; a second one has the remedy.

    >>> print(format_outcome(Outcome(stage="place", name="memory", result="PASS", seconds=0.2, detail="24 GiB")))
    PASS    0.2 s  place: memory: 24 GiB
    """
    line = f"{outcome.result:6} {outcome.seconds:4.1f} s  {outcome.stage}: {outcome.name}: {outcome.detail}"
    return f"{line}\n{'':6} remedy: {outcome.remedy}" if outcome.remedy else line


def run_checks(stage: str, checks: Iterable[Check], outcomes: OutcomeFile, *, deadline: float = float("inf")) -> None:
    """Run the checks that have no outcome yet; after the deadline, record that they were not begun."""
    ended = {outcome.name for outcome in outcomes.read_outcomes() if outcome.stage == stage}
    for check in (check for check in checks if check.name not in ended):
        if time.time() <= deadline:
            outcomes.begin(stage, check)
            outcome = run_check(stage, check)
        else:
            over, remedy = "the stage's time was over", f"give it more: stages=[{stage}] minutes=60"
            outcome = Outcome(stage=stage, name=check.name, result=Result.SKIP, seconds=0.0, detail=over, remedy=remedy)
        outcomes.end(outcome)


def run_check(stage: str, check: Check) -> Outcome:
    """Run one check; whatever it raises is its outcome."""
    start = time.perf_counter()
    try:
        result, detail = Result.PASS, check.run()
    except CheckSkippedError as reason:
        result, detail = Result.SKIP, str(reason)
    except Exception as error:  # noqa: BLE001 - a device may raise anything
        result = Result.FAIL if check.is_needed else Result.ABSENT
        detail = shorten_error(error)
    seconds, remedy = round(time.perf_counter() - start, 2), check.remedy if result is Result.FAIL else ""
    return Outcome(stage=stage, name=check.name, result=result, seconds=seconds, detail=detail, remedy=remedy)


def shorten_error(error: BaseException) -> str:
    """Return the type and the text of an error in one line.

    >>> shorten_error(CheckFailedError("3 of 9 tokens differ"))
    '3 of 9 tokens differ'
    """
    text = " ".join(str(error).split())
    name = "" if isinstance(error, CheckFailedError) else f"{type(error).__name__}: "
    return (name + text)[:MAX_DETAIL]
