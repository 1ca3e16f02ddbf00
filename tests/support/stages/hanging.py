"""A stage whose second check hangs."""

import time
from collections.abc import Iterator

from train.device.checks import Check, CheckContext


def list_checks(context: CheckContext) -> Iterator[Check]:
    yield Check(name="before", run=lambda: "", remedy="none")
    yield Check(name="hang", run=hang, remedy="do not hang")
    yield Check(name="after", run=lambda: "", remedy="none")


def hang() -> str:
    time.sleep(300)
    return "awake"
