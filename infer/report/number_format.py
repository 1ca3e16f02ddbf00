"""The table type of all reports, and the formats of figures in its cells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from infer.results.intervals import Estimate
from infer.results.schema import DraftInfo, Verdict
from infer.verify.config import Verification
from models.io.console import build_aligned_table
from models.io.pages import render_markdown_table

ABSENT = "-"


@dataclass(kw_only=True)
class Table:
    """A titled table; the first `label_columns` columns name the row, the others hold figures."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    label_columns: int = 1
    stacked_headers: bool = False  # on a terminal, each word of a column's name takes a line
    footnotes: list[str] = field(default_factory=list)  # conclusions from the figures, in sentences

    @classmethod
    def from_records(cls, records: Iterable[dict[str, str]], **settings: Any) -> "Table":
        """Build a table of records, each of which has a cell for every column, by its name."""
        records = list(records)
        columns = list(records[0]) if records else []
        return cls(columns=columns, rows=[list(record.values()) for record in records], **settings)

    def render_markdown(self) -> str:
        """Return the columns and rows as Markdown."""
        return render_markdown_table(self.columns, self.rows, label_columns=self.label_columns)


def to_rich_table(table: Table, *, ruled: bool) -> RichTable:
    """Convert a table for a terminal: with rules, or as plain aligned lines."""
    columns = [name.replace(" ", "\n") if table.stacked_headers else name for name in table.columns]
    rows = table.rows
    if table.label_columns > 1:  # a group is named in its first row only
        pairs = zip(rows, [[""], *rows], strict=False)
        rows = [[row[0] if row[0] != previous[0] else "", *row[1:]] for row, previous in pairs]
    return build_aligned_table(
        columns, rows, ruled=ruled, label_columns=table.label_columns, no_wrap=table.stacked_headers
    )


def choose_console(output: Console) -> Console:
    """Return `output` if it is a terminal, else a plain console of 100 columns to the same file."""
    plain = Console(file=output.file, width=100, color_system=None, emoji=False)
    return output if output.is_terminal else plain


def format_estimate(value: Estimate | None, *, signed: bool = False) -> str:
    """Format a mean and its interval: `2.31 [2.10, 2.52]`."""
    if value is None:
        return ABSENT
    mean = f"{value.mean:+.2f}" if signed else f"{value.mean:.2f}"
    interval = ", ".join(f"{bound:.2f}" for bound in value.ci95) if value.ci95 else "?"
    return f"{mean} [{interval}]"


def format_number(value: Estimate | float | None, *, decimals: int = 2) -> str:
    """Format a number, or a mean without its interval; a dash if there is none."""
    number = value.mean if isinstance(value, Estimate) else value
    return ABSENT if number is None else f"{number:.{decimals}f}"


def format_millions(count: int) -> str:
    """Format a count in millions, such as parameters, or bytes in MB.

    >>> format_millions(456_789), format_millions(1_720_574_976)
    ('0.46', '1,721')
    """
    return f"{count / 1e6:.2f}" if count < 100e6 else f"{count / 1e6:,.0f}"


def format_lossless(verdict: Verdict, draft: DraftInfo | None = None) -> str:
    """Format the verdict on losslessness; name the rule if it is lossy, and a target of the draft's own."""
    own = " (own)" if draft is not None and draft.target else ""
    if verdict.lossy:
        return f"no ({verdict.verification}){own}"
    return (verdict.lossless if is_compared(verdict) else "in distribution") + own


def is_compared(verdict: Verdict) -> bool:
    """Return whether answers were compared with those of autoregressive decoding; ratio tests draw different ones."""
    return not Verification(verdict.verification).is_ratio_test
