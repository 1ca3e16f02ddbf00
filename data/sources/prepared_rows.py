"""A prepared row: what was asked, what the target answered, and where it came from.

    outputs/prepare/RUN/train-00000-of-00001.parquet      one row a line of the table
    outputs/prepare/RUN/held_out-00000-of-00001.parquet

Messages, tools and the template's arguments are JSON in their columns: a table would give every
row the keys of all rows.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from data.config import Turns
from data.sources.row_formats import Conversation, MisfitError, Text, Tokenised
from data.sources.tokenized import from_spans
from models.checkpoint import atomic_path
from models.errors import UserError

BATCH_ROWS, BATCH_CHARS = 256, 2**23  # in memory while a table is written
NOTES = b"prepared"  # in the footer of a file


@dataclass(kw_only=True)
class Spans:
    """A tokenised document, and the spans [begin, end) of it that the target generated."""

    ids: list[int]
    spans: list[list[int]]


@dataclass(kw_only=True)
class Drawn:
    """How an answer was drawn, and how it ended."""

    turn: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    finish_reason: str  # stop | length
    tokens: int
    retokenised: bool


@dataclass(kw_only=True)
class Row:
    """A conversation, or a plain text or prompt; `documents` and `answers` once it is answered."""

    id: str
    source: str
    licence: str = ""
    category: str = ""
    language: str = ""
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    documents: list[Spans] = field(default_factory=list)
    answers: list[Drawn] = field(default_factory=list)


_JSON = ("messages", "tools", "template")
_TO_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode
ASKED = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "licence", "category", "language")),
        *((name, pa.large_string()) for name in ("messages", "text", "tools", "template")),
    ]
)
_SPANS = pa.struct([("ids", pa.list_(pa.int32())), ("spans", pa.list_(pa.list_(pa.int32())))])
_DRAWN = pa.struct(
    [
        ("turn", pa.int32()), ("temperature", pa.float64()), ("top_p", pa.float64()),
        ("top_k", pa.int32()), ("seed", pa.int64()), ("finish_reason", pa.string()),
        ("tokens", pa.int32()), ("retokenised", pa.bool_()),
    ]
)  # fmt: skip
SCHEMA = ASKED.append(pa.field("documents", pa.list_(_SPANS))).append(
    pa.field("answers", pa.list_(_DRAWN))
)


def record(row: Row) -> dict[str, Any]:
    """The row as columns of the table. Raises ValueError for numbers that JSON does not have."""
    columns = dict(vars(row))  # not asdict, which copies every message
    for name in _JSON:
        if columns[name] is not None:
            columns[name] = _TO_JSON(columns[name])
    columns["documents"] = [vars(document) for document in row.documents]
    columns["answers"] = [vars(answer) for answer in row.answers]
    return columns


def row_of(columns: dict[str, Any]) -> Row:
    """The row that `record` made these columns of. Other columns are ignored."""
    known = {name: columns[name] for name in ASKED.names}
    for name in _JSON:
        if known[name] is not None:
            known[name] = json.loads(known[name])
    documents = [Spans(**each) for each in columns.get("documents") or []]
    answers = [Drawn(**each) for each in columns.get("answers") or []]
    return Row(**known, documents=documents, answers=answers)


def learned(row: Row, turns: Turns) -> Iterator[Conversation | Text | Tokenised]:
    """What a draft learns of the row: the recorded documents, else its own text or turns."""
    told: dict[str, Any] = {"category": row.category, "language": row.language}
    if row.documents:
        kept = row.documents
        if turns is Turns.last:
            kept = [Spans(ids=kept[-1].ids, spans=kept[-1].spans[-1:])]
        yield from (replace(from_spans(each.ids, each.spans), **told) for each in kept)
    elif row.text is not None:
        yield Text(text=row.text, **told)
    else:
        messages = row.messages or []
        last = max((n for n, m in enumerate(messages, 1) if m["role"] == "assistant"), default=0)
        if not last:
            raise MisfitError("no assistant turn")
        yield Conversation(
            messages=messages[:last], tools=row.tools, template=row.template, **told
        )  # nothing is learned from what follows the last answer


def batches(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """So many rows at a time, or so much text."""
    batch, chars = [], 0
    for columns in records:
        batch.append(columns)
        chars += sum(len(value) for value in columns.values() if isinstance(value, str))
        if len(batch) >= BATCH_ROWS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def write(path: Path, rows: Iterable[Row], notes: Callable[[], dict[str, Any]]) -> None:
    """The file appears when it is whole; `notes`, asked for at the end, stand in its footer."""
    with (
        atomic_path(path) as partial,
        parquet.ParquetWriter(partial, SCHEMA, compression="zstd") as table,
    ):
        for batch in batches(map(record, rows)):
            table.write_batch(pa.RecordBatch.from_pylist(batch, SCHEMA))
        table.add_key_value_metadata({NOTES.decode(): json.dumps(notes())})


def read_notes(path: Path) -> dict[str, Any]:
    """What the writer of the file noted."""
    return json.loads(parquet.read_metadata(path).metadata[NOTES])


def read(folder: Path, split: str = "train") -> Iterator[Row]:
    """Rows of a prepared folder, streamed file by file; nothing is copied to a cache.

    Raises UserError where there are none.
    """
    from datasets import load_dataset

    files = sorted(map(str, folder.glob(f"{split}-*.parquet")))
    if not files:
        raise UserError(
            f"data.path: must be a folder written by data.prepare, got {folder} without "
            f"{split}-*.parquet; run `python -m data.prepare` first"
        )
    for columns in load_dataset("parquet", data_files=files, split="train", streaming=True):
        yield row_of(columns)
