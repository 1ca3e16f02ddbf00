"""A source read to its end, row by row: each is kept on disk, or counted under one reason."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.config import DEMO
from data.mixture.config import SourceConf
from data.mixture.filters import COLUMNS, Rules, candidate, mapped
from data.progress import Progress
from data.sources.files import Raw, open_rows
from data.sources.prepared_rows import batches
from data.sources.row_formats import MisfitError, shape
from models.checkpoint import atomic_path
from models.errors import UserError

DEMO_PROMPTS = 1536
LOOKED_AT = 100  # rows, one of which must have a known shape
REASONS = 5  # that are said of a source
UNKNOWN = ("no messages, text or prompt", "no column ")
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Gathered:
    """Rows read of a source, and those that cannot be used, by reason."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of a reason: the first place

    def drop(self, reason: str, place: str, detail: str) -> None:
        self.dropped[reason] += 1
        if reason not in self.examples:
            said = f" ({in_line(detail, 200)})" if detail else ""
            self.examples[reason] = in_line(place, 1000) + said

    def __str__(self) -> str:
        kept = self.read - self.dropped.total()
        reasons = "".join(f"; {n:,} {why}" for why, n in self.dropped.most_common(REASONS))
        return f"{self.read:,} rows read, {kept:,} can be used{reasons}"

    def refuse_nothing(self, name: str) -> None:
        """Raises UserError for a source that gives no row."""
        if self.read == self.dropped.total():
            raise UserError(
                f"mixture.sources.{name}: must hold a row that can be used, got {self}; "
                "remove the source, or say by its columns what holds what"
            )


def in_line(text: str, most: int) -> str:
    """What data says of itself, fit for a line of a report: no line ends, nothing but UTF-8."""
    text = " ".join(text.encode(errors="backslashreplace").decode().split())
    return text if len(text) <= most else f"{text[:most]} ..."


def check_source(name: str, source: SourceConf) -> None:
    """Raises UserError unless one of the first rows can be read and has a shape that is known."""
    columns: dict[str, None] = {}
    known, saw = False, ""
    for place, row, fault, detail in islice(raw_rows(name, source), LOOKED_AT):
        if row is not None:
            columns.update(dict.fromkeys(row))
            known = known or _is_known(row, source)
        elif not saw:
            saw = f"{fault} at {place}" + (f" ({detail})" if detail else "")
    key = f"mixture.sources.{name}"
    if not columns:
        raise UserError(
            f"{key}.path: must hold rows that can be read, got "
            f"{in_line(saw, 300) or f'none in {source.path}'}; give JSON lines, a JSON array or "
            "Parquet"
        )
    if not known:
        raise UserError(
            f"{key}.columns: must say which column holds the messages, text or prompt of a data "
            f"set of unknown shape, got columns {in_line(', '.join(columns), 500)} in "
            f"{source.path}; write columns: {{messages: THEIRS}}, or "
            f"+{key}.columns.messages=THEIRS"
        )
    if absent := ", ".join(theirs for theirs in source.columns.values() if theirs not in columns):
        log.warning("%s.columns: none of the first rows has %s", key, absent)


def _is_known(row: dict[str, Any], source: SourceConf) -> bool:
    """Whether its columns are: what they hold is judged later."""
    try:
        shape(mapped(row, source.columns))
    except MisfitError as error:
        return not str(error).startswith(UNKNOWN)
    return True


def raw_rows(name: str, source: SourceConf) -> Iterator[Raw]:
    """Open the source now; its rows one by one."""
    if source.path == DEMO:
        return _demo(source.limit or DEMO_PROMPTS)
    opened = open_rows(
        source.path, key=f"mixture.sources.{name}.path", subset=source.subset,
        split=source.split, revision=source.revision,
    )  # fmt: skip
    return islice(opened, source.limit)


def _demo(count: int) -> Iterator[Raw]:
    from data.demo.prompts import training_prompts

    for prompt in training_prompts(count, seed=0):
        yield Raw(prompt.id, {"id": prompt.id, "category": prompt.category, "text": prompt.text})


def gather(name: str, source: SourceConf, rules: Rules, file: Path) -> Gathered:
    """Read all of the source into `file`, once: a finished file is left as it is."""
    counts = file.with_suffix(".json")  # written last
    if counts.exists():
        found = json.loads(counts.read_text())
        return Gathered(**{**found, "dropped": Counter(found["dropped"])})
    gathered = Gathered()
    with (
        Progress(name, total=None) as progress,
        atomic_path(file) as partial,
        pa.ipc.new_stream(partial, COLUMNS) as table,
    ):
        for batch in batches(_candidates(name, source, rules, gathered)):
            table.write(pa.RecordBatch.from_pylist(batch, COLUMNS))
            progress.count(done=len(batch))
    with atomic_path(counts) as partial:
        partial.write_text(json.dumps(vars(gathered)))
    return gathered


def _candidates(
    name: str, source: SourceConf, rules: Rules, gathered: Gathered
) -> Iterator[dict[str, Any]]:
    for place, raw, fault, detail in raw_rows(name, source):
        gathered.read += 1
        if raw is None:
            gathered.drop(fault, place, detail)
            continue
        try:
            yield candidate(raw, name, source, rules)
        except MisfitError as error:
            gathered.drop(str(error), place, error.detail)
        except UnicodeEncodeError as error:  # JSON can say what no text can
            gathered.drop("half of a surrogate pair", place, error.reason)
