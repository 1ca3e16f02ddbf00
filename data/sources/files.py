"""Read raw rows from files and tables, one by one, and mark those that cannot be read.

Files: JSON lines, one JSON array, one object with a list of rows (each gzipped or not), Parquet.
One batch of rows is in memory at a time; an array or an object is read as a whole.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet, types

from data.config import CONTENT_COLUMNS
from models.io.errors import UserError, first_line

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json", ".json.gz")  # in lower case, as the others
PARQUET_SUFFIXES = (".parquet",)
ByteStream = BufferedReader | gzip.GzipFile
GZIP_MAGIC = b"\x1f\x8b"
VALUE_START = re.compile(rb"\[|\{(.*[\[{,])?|\[\s*\{.*", re.DOTALL)  # a first line that goes on in the next
TABLE_BATCH_ROWS = 32  # rows read from a table at a time; each may take megabytes


class RawRow(NamedTuple):
    """A row and its location. An unreadable row is None, and `reason` says why."""

    location: str
    row: dict[str, Any] | None
    reason: str = ""
    detail: str = ""


def count_rows(file: Path, key: str) -> int | None:
    """Count the rows of a file without parsing them; return None if that takes parsing."""
    with _report_damage(file, key):
        if file.suffix.lower() in PARQUET_SUFFIXES:
            return parquet.read_metadata(file).num_rows
        with _open_json(file) as stream:
            is_one_value = _may_be_one_value(stream, file)
            return None if is_one_value else sum(1 for line in stream if line.strip())


def read_file_rows(file: Path, key: str) -> Iterator[RawRow]:
    """Yield the rows of one file; raise UserError if the file itself is damaged."""
    with _report_damage(file, key):
        if file.suffix.lower() in PARQUET_SUFFIXES:
            with parquet.ParquetFile(file) as table:
                yield from _read_batches(table.iter_batches(batch_size=TABLE_BATCH_ROWS), str(file))
        else:
            yield from _read_json(file)


@contextmanager
def _report_damage(file: Path, key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise UserError(
            f"{key}: must be a readable file, got {file} ({first_line(error)}); "
            "check the path, or write the file again, as UTF-8"
        ) from error


def _open_json(file: Path) -> ByteStream:
    """Open a JSON file, compressed by gzip or not; raise ValueError if it is not UTF-8."""
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(GZIP_MAGIC):
        return gzip.GzipFile(file)
    if b"\0" in start or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("UTF-16 or a binary file, in place of UTF-8")
    return file.open("rb")


def _read_json(file: Path) -> Iterator[RawRow]:
    with _open_json(file) as stream:
        if _may_be_one_value(stream, file):
            try:
                yield from _list_rows(json.load(stream), str(file))
                return
            except (ValueError, RecursionError):
                if file.name.endswith((".json", ".json.gz")):
                    raise
                stream.seek(0)
        lines = enumerate(stream, 1)
        yield from (_parse_line(f"{file}:{n}", line) for n, line in lines if line.strip())


def _may_be_one_value(stream: ByteStream, file: Path) -> bool:
    """Return whether a JSON file may be one array or object, not a row in each line; rewind the stream."""
    lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in stream)
    first, second = islice(chain(filter(None, lines), (b"", b"")), 2)
    stream.seek(0)
    is_array = first.startswith(b"[") and file.name.endswith((".json", ".json.gz"))
    is_only_line = first.startswith(b"{") and not second
    return is_array or is_only_line or bool(VALUE_START.fullmatch(first))


def _list_rows(value: Any, name: str) -> Iterator[RawRow]:
    """Yield the rows of an array, the rows that an object holds, or the object as a row."""
    if isinstance(value, dict):
        key = _find_row_list(value)
        if key is None:
            yield RawRow(f"{name}:1", value)
            return
        value, name = value[key], f"{name}:{key}"
    for number, row in enumerate(value):
        yield _check_object(f"{name}:[{number}]", row)


def _find_row_list(value: dict[str, Any]) -> str | None:
    """Return the key of an object's rows, or None for an object that is a row itself.

    >>> _find_row_list({"version": 1, "data": [{"text": "a"}, {"text": "b"}]})
    'data'
    >>> _find_row_list({"prompt": "a", "tools": [{"name": "b"}]})
    """
    lists = [key for key, items in value.items() if isinstance(items, list)]
    if len(lists) != 1 or (value.keys() - set(lists)).intersection(CONTENT_COLUMNS):
        return None
    is_row_list = all(isinstance(row, dict) and row.keys().isdisjoint(("role", "from")) for row in value[lists[0]])
    return lists[0] if is_row_list and value[lists[0]] else None


def _parse_line(location: str, line: bytes) -> RawRow:
    """Return the line's row, or a row that holds the reason why it cannot be parsed."""
    try:
        return _check_object(location, json.loads(line.removeprefix(codecs.BOM_UTF8).decode()))
    except UnicodeDecodeError as error:
        return RawRow(location, None, "a line that is not UTF-8", str(error))
    except (ValueError, RecursionError) as error:
        return RawRow(location, None, "a line that cannot be parsed as JSON", str(error))


def _check_object(location: str, row: Any) -> RawRow:
    if isinstance(row, dict):
        return RawRow(location, row)
    return RawRow(location, None, "a line that is not a JSON object", f"a {type(row).__name__}")


def read_dataset_rows(dataset: Any, name: str) -> Iterator[RawRow]:
    """Return an iterator over the rows of a Hugging Face dataset."""
    return _read_batches(dataset.with_format("arrow").iter(batch_size=TABLE_BATCH_ROWS), name)


def _read_batches(batches: Iterable[Any], name: str) -> Iterator[RawRow]:
    for number, row in enumerate(chain.from_iterable(map(_convert_batch, batches))):
        location = f"{name}:[{number}]"
        yield RawRow(location, row) if isinstance(row, dict) else RawRow(location, None, *row)


def _convert_batch(batch: Any) -> list[dict[str, Any] | tuple[str, str]]:
    """Convert a batch to rows; one that Python cannot represent becomes (reason, detail)."""
    try:
        return [
            {field.name: _read_value(row[field.name], field.type) for field in batch.schema}
            for row in batch.to_pylist()
        ]
    # OverflowError: dates and durations; RecursionError: JSON that is nested too deep
    except (ValueError, OverflowError, RecursionError) as error:
        if batch.num_rows == 1:
            reason = {
                UnicodeDecodeError: "text that is not UTF-8",
                json.JSONDecodeError: "a value that cannot be parsed as JSON",
                RecursionError: "a value that cannot be parsed as JSON",
            }.get(type(error), "a value that is out of range")
            return [(reason, str(error))]
    # A single bad row fails the whole batch, so rows are converted one by one.
    rows = (batch.slice(index, 1) for index in range(batch.num_rows))
    return list(chain.from_iterable(map(_convert_batch, rows)))


def _read_value(value: Any, kind: pa.DataType) -> Any:
    """Return a table's value with its JSON parsed, and without null keys outside of it.

    `datasets` stores objects of unequal keys as JSON. In other objects, tables add null keys, which
    templates mistake for set keys. Raises JSONDecodeError or RecursionError.
    """
    if value is None or not (types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)):
        return value
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else value
    if types.is_struct(kind):
        items = ((field, value[field.name]) for field in kind)
        return {field.name: _read_value(item, field.type) for field, item in items if item is not None}
    if types.is_map(kind):
        return {key: _read_value(item, kind.item_type) for key, item in value}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        is_plain = types.is_primitive(kind.value_type)  # such as token ids
        return value if is_plain else [_read_value(item, kind.value_type) for item in value]
    return value
