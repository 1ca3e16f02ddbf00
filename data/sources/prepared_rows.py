"""Read and write prepared rows: a prompt, the target's answers, and where the row came from.

Messages, tools and the template's arguments are JSON: in columns of their own, rows would get the keys of all rows.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from conf.entry import command_that_writes
from data.config import TurnSelection
from data.sources.open_rows import read_split
from data.sources.row_formats import truncate_to_last_answer
from data.sources.rows import Conversation, ParsedRow, PlainText, document_from_spans
from data.sources.splits import list_split_names
from data.sources.text_hashes import hash_first_question
from models.io.errors import UserError, require
from models.io.files import atomic_path

BATCH_ROWS, BATCH_CHARS = 256, 2**23  # most rows or characters in memory while a table is written
HELD_OUT, TRAIN = "held_out", "train"  # splits of a prepared folder
METADATA_KEY = b"prepared"  # in the footer of a file
PREPARED_VERSION = 2  # of the files; a file of version 1 records no version


@dataclass(kw_only=True)
class RecordedDocument:
    """A tokenized document, and the spans [begin, end) of it that the target generated."""

    ids: list[int]
    spans: list[list[int]]


@dataclass(kw_only=True)
class SamplingInfo:
    """The sampling settings of an answer, its finish reason and its size."""

    turn: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    finish_reason: str  # stop | length
    tokens: int
    retokenized: bool


@dataclass(kw_only=True)
class PreparedRow:
    """A conversation, a plain text or a prompt; `documents` and `answers` are set once answered."""

    id: str
    source: str
    license: str = ""
    category: str = ""
    language: str = ""
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    documents: list[RecordedDocument] = field(default_factory=list)
    answers: list[SamplingInfo] = field(default_factory=list)


_JSON_COLUMNS = ("messages", "tools", "template")
_TO_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode
INPUT_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "license", "category", "language")),
        *((name, pa.large_string()) for name in ("messages", "text", "tools", "template")),
    ]
)
_DOCUMENT_TYPE = pa.struct([("ids", pa.list_(pa.int32())), ("spans", pa.list_(pa.list_(pa.int32())))])
_ARROW_TYPES: dict[Any, pa.DataType] = {int: pa.int32(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_SAMPLING_TYPE = pa.struct(  # Seeds are below 2^48.
    [(part.name, pa.int64() if part.name == "seed" else _ARROW_TYPES[part.type]) for part in fields(SamplingInfo)]
)
SCHEMA = pa.schema([*INPUT_SCHEMA, ("documents", pa.list_(_DOCUMENT_TYPE)), ("answers", pa.list_(_SAMPLING_TYPE))])


def row_to_columns(row: PreparedRow) -> dict[str, Any]:
    """Convert a row to columns of the table; raise ValueError for NaN and infinities."""
    columns = vars(row)  # asdict would copy every message
    encoded = {name: _TO_JSON(columns[name]) for name in _JSON_COLUMNS if columns[name] is not None}
    records = {name: [vars(record) for record in columns[name]] for name in ("documents", "answers")}
    return columns | encoded | records


def row_from_columns(columns: dict[str, Any]) -> PreparedRow:
    """Convert columns of the table, as written by `row_to_columns`; ignore other columns."""
    inputs = {name: columns[name] for name in INPUT_SCHEMA.names}
    decoded = {name: json.loads(inputs[name]) for name in _JSON_COLUMNS if inputs[name] is not None}
    return PreparedRow(
        **inputs | decoded,
        documents=[RecordedDocument(**document) for document in columns.get("documents") or []],
        answers=[SamplingInfo(**answer) for answer in columns.get("answers") or []],
    )


def parse_prepared_row(row: PreparedRow, turns: TurnSelection) -> Iterator[ParsedRow]:
    """Yield the documents recorded with the target's answers, or else the row's own text or conversation.

    With turns=last only the last recorded answer counts. Raises RowRejectedError for a conversation without an answer.
    """
    labels: dict[str, Any] = {"category": row.category, "language": row.language}
    if row.documents:
        recorded = row.documents
        if turns is TurnSelection.last:
            recorded = [RecordedDocument(ids=recorded[-1].ids, spans=recorded[-1].spans[-1:])]
        labels["first_question"] = hash_first_question(row.messages or [])
        for document in recorded:
            yield replace(document_from_spans(document.ids, document.spans), **labels)
    elif row.text is not None:
        yield PlainText(text=row.text, **labels)
    else:
        conversation = Conversation(messages=row.messages or [], tools=row.tools, template=row.template, **labels)
        yield truncate_to_last_answer(conversation)


def batch_records(records: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of at most BATCH_ROWS records and about BATCH_CHARS characters."""
    batch, chars = [], 0
    for columns in records:
        batch.append(columns)
        chars += sum(len(value) for value in columns.values() if isinstance(value, str))
        if len(batch) >= BATCH_ROWS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def write_prepared_rows(path: Path, rows: Iterable[PreparedRow], counts: dict[str, Any]) -> None:
    """Write a file of prepared rows atomically; its footer has their numbers by source and license, and `counts`."""
    licenses: dict[str, Counter[str]] = defaultdict(Counter)
    with atomic_path(path) as partial, parquet.ParquetWriter(partial, SCHEMA, compression="zstd") as table:
        for batch in batch_records(map(row_to_columns, rows)):
            for columns in batch:
                licenses[columns["source"]][columns["license"]] += 1
            table.write_batch(pa.RecordBatch.from_pylist(batch, SCHEMA))
        # Reading the rows may change `counts`: they are read after the last row.
        metadata = {"version": PREPARED_VERSION, "licenses": licenses, **counts}
        table.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(metadata)})


def read_prepared_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata in the footer of a prepared file; reject any other version by UserError."""
    try:
        footer = parquet.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"data.path: must hold intact Parquet files, got {path} ({error}); copy it again, or delete it and run "
            "`python -m data.prepare` again"
        ) from error
    metadata = json.loads(footer.get(METADATA_KEY, "{}"))
    version = metadata.get("version", 1)
    require(
        version == PREPARED_VERSION,
        f"data.path: must be a folder of version {PREPARED_VERSION}, got version {version} in "
        f"{path}; run `python -m data.prepare` again",
    )
    return metadata


def read_answering_target(folder: Path, split: str, tokenizer: Any) -> str:
    """Return whose answers a split holds, "the target" if it does not tell; reject ids of another tokenizer."""
    from models.checkpoints.fingerprints import tokenizer_fingerprint  # deferred: imports PyTorch

    files = chain.from_iterable(list_prepared_files(folder, split).values())
    answered = [metadata for metadata in map(read_prepared_metadata, files) if metadata.get("target")]
    authors = ", ".join(dict.fromkeys(metadata["target"] for metadata in answered))
    require(
        {metadata["tokenizer"] for metadata in answered} <= {tokenizer_fingerprint(tokenizer)},
        f"data.path: must have token ids of the target's own tokenizer, got {folder}, which {authors} answered; let "
        "the target answer, by data.prepare answers=target",
    )
    return authors or "the target"


def read_prepared_rows(folder: Path, split: str = "train") -> Iterator[PreparedRow]:
    """Yield the rows of a prepared folder, without a copy in a cache; raise UserError for missing or outdated files."""
    files = list_prepared_files(folder, split)
    for file in chain.from_iterable(files.values()):
        read_prepared_metadata(file)
    for raw in read_split(split, files, "data.path"):
        assert raw.row is not None, raw.detail
        yield row_from_columns(raw.row)


def list_prepared_files(folder: Path, split: str) -> dict[str, list[Path]]:
    """Return the files of each name in the split; raise UserError for a name without any."""
    files = {name: sorted(folder.glob(f"{name}-*-of-*[0-9].parquet")) for name in list_split_names(split)}
    command = command_that_writes(folder) or "python -m data.prepare"
    for name, paths in files.items():
        require(
            bool(paths),
            f"data.path: must be a folder written by data.prepare, got {folder} without "
            f"{name}-*.parquet; run `{command}` first",
        )
        count = int(paths[-1].stem.rpartition("-of-")[2])
        require(
            len(paths) == count,
            f"data.path: must be a finished folder of data.prepare, got {folder} with {len(paths)} of {count} files of "
            f"{name}; let its other workers end, `{command}`",
        )
    return files
