"""A stage whose checks end their process in two ways, between others that pass."""

import os
import signal
from collections.abc import Iterator

from train.device.checks import Check, CheckContext


def list_checks(context: CheckContext) -> Iterator[Check]:
    yield Check(name="before", run=describe_process, remedy="none")
    yield Check(name="exit", run=lambda: os._exit(3), remedy="do not exit")
    yield Check(name="between", run=describe_process, remedy="none")
    yield Check(name="signal", run=kill_process, remedy="do not kill")
    yield Check(name="after", run=describe_process, remedy="none")


def describe_process() -> str:
    return f"process {os.getpid()}"


def kill_process() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "still alive"
