"""A stage that ends its process behind its only check."""

import os
from collections.abc import Iterator

from train.device.checks import Check, CheckContext


def list_checks(context: CheckContext) -> Iterator[Check]:
    yield Check(name="only", run=lambda: "", remedy="none")
    os._exit(6)
