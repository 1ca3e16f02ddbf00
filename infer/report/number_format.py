"""A table of text, and how figures are written in its cells."""

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table as RichTable

from infer.report.views import Mode
from models.console import aligned

ABSENT = "-"
IN_DISTRIBUTION = ("rejection", "block")  # proven, and not to be seen in single answers


@dataclass(kw_only=True)
class Table:
    """A titled table; the first `labels` columns name the row, the others hold figures."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    labels: int = 1
    stacked: bool = False  # on a terminal the columns' names take a line for each word
    below: list[str] = field(default_factory=list)  # what the figures come to, in sentences


def rich_table(table: Table, *, ruled: bool) -> RichTable:
    """For a terminal: with rules, or plain aligned lines."""
    columns = [name.replace(" ", "\n") if table.stacked else name for name in table.columns]
    rows = []
    for row, before in zip(table.rows, [None, *table.rows], strict=False):
        # A group is named once, as in a printed table.
        repeated = table.labels > 1 and before is not None and before[0] == row[0]
        rows.append(([""] if repeated else row[:1]) + row[1:])
    return aligned(columns, rows, ruled=ruled, labels=table.labels, whole=table.stacked)


def estimate(value: dict[str, Any] | None, *, signed: bool = False) -> str:
    """A mean and its interval: `2.31 [2.10, 2.52]`."""
    if value is None:
        return ABSENT
    mean = f"{value['mean']:+.2f}" if signed else f"{value['mean']:.2f}"
    if value["ci95"] is None:
        return f"{mean} [?]"
    low, high = value["ci95"]
    return f"{mean} [{low:.2f}, {high:.2f}]"


def number(value: float | None) -> str:
    """Two decimals, or a dash."""
    return ABSENT if value is None else f"{value:.2f}"


def millions(count: int) -> str:
    """Parameters, or bytes as MB.

    >>> millions(456_789), millions(1_720_574_976)
    ('0.46', '1,721')
    """
    return f"{count / 1e6:.2f}" if count < 100e6 else f"{count / 1e6:,.0f}"


def lossless(mode: Mode) -> str:
    """Whether the answers are the target's; lossy verification is named."""
    if mode["lossy"]:
        return f"no ({mode['verification']})"
    if not compared(mode):
        return "in distribution"
    return mode["lossless"]


def compared(mode: Mode) -> bool:
    """Whether its answers were held against autoregressive decoding."""
    return mode["verification"] not in IN_DISTRIBUTION


def percentiles(value: dict[str, float] | None) -> str:
    """`p50 / p90 / p99`."""
    return " / ".join(f"{value[key]:.1f}" for key in ("p50", "p90", "p99")) if value else ABSENT
