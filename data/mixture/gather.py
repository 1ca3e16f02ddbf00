"""Reading a source to its end: each row goes to disk or is counted under one reason."""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.config import DEMO
from data.mixture.filters import CANDIDATE_SCHEMA, FilterRules, filter_row, map_columns
from data.prepare_config import SourceConf
from data.sources.files import RawRow
from data.sources.open_rows import open_rows
from data.sources.prepared_rows import batch_records
from data.sources.row_formats import parse_row
from data.sources.rows import RowRejectedError
from models.io.console import track_progress
from models.io.errors import require

DEMO_PROMPTS = 1536
CHECKED_ROWS = 100  # first rows of a source, of which at least one must have a known format
MAX_REASONS = 5  # reasons in the log line of a source
UNKNOWN_SHAPE_ERRORS = ("no messages, text or prompt", "no column ")
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SourceReport:
    """The row counts of one source; at the end read = train + held_out + dropped."""

    path: str
    share_asked: float | None = None
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, str] = field(default_factory=dict)  # by reason: the first location
    train: int = 0
    held_out: int = 0
    share: float = 0.0
    licenses: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, location: str, detail: str) -> None:
        """Count a dropped row; keep the first location of each reason."""
        self.dropped[reason] += 1
        suffix = f" ({to_single_line(detail, 200)})" if detail else ""
        self.examples.setdefault(reason, to_single_line(location, 1000) + suffix)

    def __str__(self) -> str:
        reasons = [f"; {n:,} {reason}" for reason, n in self.dropped.most_common(MAX_REASONS)]
        return f"{self.read:,} rows read, {self.read - self.dropped.total():,} can be used{''.join(reasons)}"


def to_single_line(text: str, max_chars: int) -> str:
    """Return text of the data as one line of valid UTF-8 that fits into a report."""
    text = " ".join(text.encode(errors="backslashreplace").decode().split())
    return text if len(text) <= max_chars else f"{text[:max_chars]} ..."


def check_source(name: str, source: SourceConf) -> None:
    """Check that one of the first rows can be read and has a known format; raise UserError otherwise."""
    first_rows = list(islice(open_source_rows(name, source), CHECKED_ROWS))
    rows = [raw.row for raw in first_rows if raw.row is not None]
    errors = [
        f"{raw.reason} at {raw.location}" + (f" ({raw.detail})" if raw.detail else "")
        for raw in first_rows
        if raw.row is None
    ]
    columns = dict.fromkeys(chain.from_iterable(rows))
    key = f"mixture.sources.{name}"
    require(
        bool(columns),
        f"{key}.path: must hold rows that can be read, got "
        f"{to_single_line(next(iter(errors), f'none in {source.path}'), 300)}; "
        "give JSON lines, a JSON array or Parquet",
    )
    require(
        any(_has_known_columns(row, source) for row in rows),
        f"{key}.columns: must name the column of the messages, text or prompt if the format is unknown, got columns "
        f"{to_single_line(', '.join(columns), 500)} in {source.path}; write columns: {{messages: COLUMN}}, or "
        f"+{key}.columns.messages=COLUMN",
    )
    if absent := ", ".join(column for column in source.columns.values() if column not in columns):
        log.warning("%s.columns: none of the first rows has %s", key, absent)


def _has_known_columns(row: dict[str, Any], source: SourceConf) -> bool:
    """Return whether the row has columns of a known format; their values are checked later."""
    try:
        parse_row(map_columns(row, source.columns))
    except RowRejectedError as error:
        return not str(error).startswith(UNKNOWN_SHAPE_ERRORS)
    return True


def open_source_rows(name: str, source: SourceConf) -> Iterator[RawRow]:
    """Resolve the source immediately and return a lazy iterator over its rows."""
    if source.path == DEMO:
        from data.demo.prompts import training_prompts

        return (
            RawRow(prompt.id, {"id": prompt.id, "category": prompt.category, "text": prompt.text})
            for prompt in training_prompts(source.limit or DEMO_PROMPTS, seed=0)
        )
    key = f"mixture.sources.{name}.path"
    rows = open_rows(source.path, key=key, subset=source.subset, split=source.split, revision=source.revision)
    return islice(rows, source.limit)


def ingest_source(name: str, source: SourceConf, rules: FilterRules, file: Path) -> SourceReport:
    """Write all candidate rows of the source to `file` and return its counts; raise UserError if there are none."""
    report = SourceReport(path=source.path, share_asked=source.share)
    candidates = _iter_candidates(name, source, rules, report)
    with pa.ipc.new_stream(file, CANDIDATE_SCHEMA) as table:
        for batch in batch_records(track_progress(candidates, name)):
            table.write(pa.RecordBatch.from_pylist(batch, CANDIDATE_SCHEMA))
    log.info("%s: %s", name, report)
    require(
        report.read > report.dropped.total(),
        f"mixture.sources.{name}: must hold a row that can be used, got {report}; remove it, map its `columns` or "
        "change the limits of `mixture`",
    )
    return report


def _iter_candidates(
    name: str, source: SourceConf, rules: FilterRules, report: SourceReport
) -> Iterator[dict[str, Any]]:
    for location, raw, reason, detail in open_source_rows(name, source):
        report.read += 1
        try:
            if raw is None:
                raise RowRejectedError(reason, detail)
            yield filter_row(raw, name, source, rules)
        except RowRejectedError as error:
            report.drop(str(error), location, error.detail)
