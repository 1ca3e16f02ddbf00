"""Mistakes that a user can fix: each is one line with key, rule, value and remedy."""

from collections.abc import Callable
from typing import Any


class UserError(Exception):
    """A user's mistake. `str(error)` reads `<config key>: <rule>, got <value>; <remedy>`."""


def require(holds: bool, message: str) -> None:
    """Raise UserError with `message` unless the condition holds."""
    if not holds:
        raise UserError(message)


def run_checks(*checks: Callable[[], Any]) -> list[Any]:
    """Run all checks and return their results; raise one UserError that lists all problems."""
    results, problems = [], []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            problems.append(str(error))
    require(not problems, "; ".join(problems))
    return results


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
