"""Mistakes that a user can fix, and rules that find them: each is one line with key, rule, value and remedy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
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


def drop_frames(error: Exception) -> Exception:
    """Return an error without its frames, whose variables it would keep alive: caches of a device, graphs."""
    if isinstance(inner := getattr(error, "inner_exception", None), Exception):  # of torch.compile
        drop_frames(inner)
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# --- rules for the values of configurations -------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A condition on one value, the text that states it, and the remedy for a value that breaks it."""

    text: str
    holds: Callable[[Any], bool]
    remedy: str


def at_least(minimum: int | float, remedy: str = "raise it") -> Rule:
    return Rule(f"must be at least {minimum}", lambda value: value >= minimum, remedy)


def at_most(maximum: int | float, remedy: str = "lower it") -> Rule:
    return Rule(f"must be at most {maximum}", lambda value: value <= maximum, remedy)


LISTED = Rule("must list numbers of at least 1", lambda numbers: min(numbers, default=0) >= 1, "list one, such as [8]")
POSITIVE = Rule("must be positive", lambda value: 0 < value < math.inf, "set a number above 0")
BELOW_ONE = Rule("must be at least 0 and below 1", lambda value: 0 <= value < 1, "choose one such as 0.1")
SEED = Rule("must be in 0..2^48 - 1", lambda value: 0 <= value < 2**48, "0 is the default")  # see derive_seed
MAX_NAME_BYTES = 200  # of a folder; file systems allow 255, and temporary names are longer
FOLDER_NAME = Rule(
    f"must name a folder below output_dir, in at most {MAX_NAME_BYTES} bytes",
    lambda name: (
        bool(parts := Path(name).parts)
        and parts[0] != "/"
        and ".." not in parts
        and max(len(part.encode()) for part in parts) <= MAX_NAME_BYTES
    ),
    "to write elsewhere set output_dir",
)
SHARE = Rule("is a share and must lie in 0..1", lambda value: 0 <= value <= 1, "choose one such as 0.1")


def check_values(conf: Any, group: str = "", /, **rules: Rule) -> None:
    """Check fields of a configuration by name; raise one UserError that lists all broken rules.

    `group` is the path of the configuration, such as `optim`. A field that is None passes every rule.
    """
    prefix = f"{group}." if group else ""
    problems = [
        f"{prefix}{name}: {rule.text}, got {value.value if isinstance(value, Enum) else value}; {rule.remedy}"
        for name, rule in rules.items()
        if (value := getattr(conf, name)) is not None and not rule.holds(value)
    ]
    require(not problems, "; ".join(problems))


def unused(*names: str) -> dict[str, tuple[str, ...]]:
    """Return the metadata of a field whose keys `names`, or all of them, the command ignores."""
    return {"unused": names or ("",)}
