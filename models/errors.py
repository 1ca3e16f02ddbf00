"""The exception for mistakes that a user can fix: key, rule, value and remedy in a sentence."""

from collections.abc import Callable
from typing import Any


class UserError(Exception):
    """A user's mistake. `str(error)` reads `<config key>: <rule>, got <value>; <remedy>`."""


def run_checks(*checks: Callable[[], Any]) -> list[Any]:
    """Run all checks and return their results; raise one UserError that lists all problems."""
    results, problems = [], []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return results
