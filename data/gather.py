"""A source read to its end, row by row: each is kept on disk, or counted under one reason."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.candidates import COLUMNS, Rules, candidate, mapped
from data.conversations import MisfitError, shape
from data.mixture import SourceConf
from data.progress import Progress
from data.raw_rows import Raw, open_rows
from models.checkpoint import atomic_path
from models.errors import UserError

DEMO = "demo"  # the path of the embedded demo's prompts
DEMO_PROMPTS = 1536
LOOKED_AT = 100  # rows, one of which must have a known shape
BATCH_ROWS, BATCH_CHARS = 1000, 2**23
REASONS = 5  # that are said of a source
UNKNOWN = ("no messages, text or prompt", "no column ")


@dataclass(kw_only=True)
class Gathered:
    """Rows read of a source, and those that cannot be used, by reason."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of a reason: the first place

    def drop(self, reason: str, place: str, detail: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, f"{place} ({detail[:200]})" if detail else place)

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


def check_source(name: str, source: SourceConf) -> None:
    """Raises UserError unless one of the first rows has a shape that is known."""
    columns: dict[str, None] = {}
    looked_at = 0
    for raw in islice(raw_rows(name, source), LOOKED_AT):
        looked_at += 1
        if raw.row is None:
            continue
        columns.update(dict.fromkeys(raw.row))
        try:
            shape(mapped(raw.row, source.columns))
        except MisfitError as error:
            if not str(error).startswith(UNKNOWN):
                return
        else:
            return
    if columns or looked_at < LOOKED_AT:
        saw = f"columns {', '.join(columns)}" if columns else f"{looked_at} rows, none whole"
        raise UserError(
            f"mixture.sources.{name}.columns: must say which column holds the messages, text or "
            f"prompt of a data set of unknown shape, got {saw} in {source.path}; write "
            "columns: {messages: THEIRS}"
        )


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
        for batch in _batches(_candidates(name, source, rules, gathered)):
            table.write(pa.RecordBatch.from_pylist(batch, COLUMNS))
            progress.count(done=len(batch))
    with atomic_path(counts) as partial:
        partial.write_text(json.dumps(vars(gathered)))
    return gathered


def _batches(candidates: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch, chars = [], 0
    for columns in candidates:
        batch.append(columns)
        chars += len(columns["messages"] or columns["text"])
        if len(batch) >= BATCH_ROWS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    yield batch


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
