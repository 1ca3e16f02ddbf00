"""Read raw rows from files and datasets, one by one, and mark those that cannot be read.

Sources: JSON lines (.jsonl, .json, gzipped or not), one JSON array (.json), Parquet, a directory
of such files, a directory written by `save_to_disk`, a hub name. One batch of rows is in memory at
a time.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet, types

from models.errors import UserError, require

JSON_SUFFIXES, PARQUET_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz"), (".parquet",)
SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")  # written by save_to_disk
DATA_SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES, ".arrow")
DATASET_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
MAX_LINE_BYTES = 64 * 2**20  # longer lines are not read into memory
TABLE_BATCH_ROWS = 32  # rows read from a table at a time; each may take megabytes
LOCAL_REMEDY = (
    "without a network give a local path by {key}=FILE: a .jsonl, .json, .parquet or .arrow file, "
    "or a directory written by save_to_disk"
)
SPLIT_NAME = re.compile(r"(^|\+)\s*[^\[+]+")  # `train` and `test` in train[1000:]+test


class RawRow(NamedTuple):
    """A row and its location. An unreadable row is None, and `reason` says why."""

    location: str
    row: dict[str, Any] | None
    reason: str = ""
    detail: str = ""


def open_rows(
    source: str, *, key: str, subset: str | None = None, split: str = "train",
    revision: str | None = None,
) -> Iterator[RawRow]:  # fmt: skip
    """Resolve the source immediately and return a lazy iterator over its rows.

    `subset` and `revision` concern only datasets. `key` is the setting that named the source; error
    messages begin with it.
    """
    if files := list_data_files(Path(source).expanduser(), split):
        return (raw for file in files for raw in read_file_rows(file, key))
    dataset = load_dataset_split(source, key=key, subset=subset, split=split, revision=revision)
    return read_dataset_rows(dataset, source)


def list_data_files(path: Path, word: str) -> list[Path]:
    """List the data files at a path: the file itself, or the files of a directory.

    If names of files in a directory contain the word, only those files are listed.
    The list is empty for datasets and missing paths.
    """
    if path.is_file() and path.suffix != ".arrow":
        return [path]
    if not path.is_dir() or any((path / name).exists() for name in SAVED_DATASET_FILES):
        return []
    files = sorted(
        file
        for file in path.iterdir()
        if file.name.endswith(JSON_SUFFIXES + PARQUET_SUFFIXES) and not file.is_dir()
    )
    pattern = re.compile(rf"(?<![a-z]){re.escape(word)}(?![a-z])", re.IGNORECASE)
    return [file for file in files if pattern.search(file.name)] or files


def is_row_file(path: Path) -> bool:
    """Return whether `read_file_rows` can read the file."""
    return path.is_file() and path.name.endswith(JSON_SUFFIXES + PARQUET_SUFFIXES)


def count_rows(file: Path) -> int | None:
    """Count the rows of a file without parsing them; return None for .json, which needs parsing."""
    if file.suffix in PARQUET_SUFFIXES:
        return parquet.read_metadata(file).num_rows
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        return None
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def read_file_rows(file: Path, key: str) -> Iterator[RawRow]:
    """Yield the rows of one file; raise UserError if the file itself is damaged."""
    try:
        yield from _read_parquet(file) if file.suffix in PARQUET_SUFFIXES else _read_json(file)
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise UserError(
            f"{key}: must be a readable file, got {file} ({first_line(error)}); "
            "check the path, or write the file again"
        ) from error


def _read_json(file: Path) -> Iterator[RawRow]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        # 64 bytes are enough for a byte-order mark, some white space and the first character.
        start = stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()
        if file.name.endswith((".json", ".json.gz")) and start[:1] == b"[":
            rows = enumerate(json.load(stream))
            yield from (_check_object(f"{file}:[{number}]", row) for number, row in rows)
        else:
            lines = enumerate(_read_lines(stream), 1)
            yield from (_parse_line(f"{file}:{n}", line) for n, line in lines if line.strip())


def _read_lines(stream: Any) -> Iterator[bytes]:
    """Yield the lines of a binary stream; of a line that is too long, only the beginning."""
    while line := stream.readline(MAX_LINE_BYTES):
        yield line
        while _is_cut(line):
            line = stream.readline(MAX_LINE_BYTES)


def _is_cut(line: bytes) -> bool:
    return len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")


def _parse_line(location: str, line: bytes) -> RawRow:
    """Return the line's row, or a row that holds the reason why it cannot be parsed."""
    if _is_cut(line):
        return RawRow(location, None, "a line that is too long", f"over {MAX_LINE_BYTES:,} bytes")
    try:
        return _check_object(location, json.loads(line.removeprefix(codecs.BOM_UTF8).decode()))
    except UnicodeDecodeError as error:
        return RawRow(location, None, "a line that is not UTF-8", str(error))
    except (ValueError, RecursionError) as error:
        return RawRow(location, None, "a line that cannot be parsed as JSON", str(error))


def _check_object(location: str, row: Any) -> RawRow:
    return (
        RawRow(location, row)
        if isinstance(row, dict)
        else RawRow(location, None, "a line that is not a JSON object", f"a {type(row).__name__}")
    )


def _read_parquet(file: Path) -> Iterator[RawRow]:
    with parquet.ParquetFile(file) as table:
        yield from _read_batches(table.iter_batches(batch_size=TABLE_BATCH_ROWS), str(file))


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
        return {
            field.name: _read_value(item, field.type) for field, item in items if item is not None
        }
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_read_value(item, kind.value_type) for item in value]
    return value


def load_dataset_split(
    source: str, *, key: str, subset: str | None, split: str, revision: str | None = None
) -> Any:
    """Return one split of a Hugging Face dataset: a hub name, a saved directory or a data file.

    Raises UserError, which begins with the setting `key`, if the split cannot be loaded.
    """
    path = Path(source).expanduser()
    check_source_path(source, key)
    from datasets import get_dataset_split_names, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if (path / "state.json").is_file():
            return load_from_disk(str(path))
        if (path / "dataset_dict.json").is_file():
            splits: Any = load_from_disk(str(path))
            split = _resolve_split(split, list(splits))
            require(
                split in splits,
                f"{key.rpartition('.')[0]}.split: must be one of {', '.join(splits)}, "
                f"got {split!r}",
            )
            return splits[split]
        if path.is_file() and path.suffix in DATASET_BUILDERS:
            return load_dataset(
                DATASET_BUILDERS[path.suffix], data_files=str(path),
                split=_resolve_split(split, ["train"]),
            )  # fmt: skip
        if path.is_dir():
            splits = get_dataset_split_names(str(path), subset)
            return load_dataset(str(path), name=subset, split=_resolve_split(split, splits))
        check_hub_dataset(source, key)
        return _load_from_hub(source, subset, split, revision)
    except (DatasetsError, OSError, ValueError) as error:
        group = key.rpartition(".")[0]
        raise UserError(
            f"{key}: must be a dataset that can be loaded, got {source!r} ({first_line(error)}); "
            f"check {group}.subset and {group}.split; {LOCAL_REMEDY.format(key=key)}"
        ) from error


def _resolve_split(split: str, names: list[str]) -> str:
    """Return the split to load; data with a single split has that one, whatever `split` names.

    A copy of one split often keeps the name that the split has in the original dataset.

    >>> _resolve_split("train_sft[1000:]", ["train"])
    'train[1000:]'
    >>> _resolve_split("train_sft", ["train", "test"])
    'train_sft'
    """
    return SPLIT_NAME.sub(rf"\1{names[0]}", split) if len(names) == 1 else split


@lru_cache(maxsize=2)  # a run opens its data several times, and the hub limits requests
def _load_from_hub(name: str, subset: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(name, name=subset, split=split, revision=revision)


def check_hub_dataset(name: str, key: str) -> None:
    """Check that the hub is reachable and has the dataset; raise UserError otherwise."""
    from huggingface_hub.errors import HTTPError

    check_source_path(name, key)
    try:
        query_hub(name)
    except HTTPError as error:
        raise UserError(
            f"{key}: must be a reachable hub name, got {name!r} ({first_line(error)}); "
            f"set HF_HUB_OFFLINE=1 to use a copy in the cache; {LOCAL_REMEDY.format(key=key)}"
        ) from error


def check_source_path(name: str, key: str) -> None:
    """Raise UserError for what does not exist and can only be a path."""
    is_path = name.startswith(("/", ".", "~")) or name.endswith(DATA_SUFFIXES)
    require(
        Path(name).expanduser().exists() or (not is_path and name.count("/") <= 1),
        f"{key}: must exist, got {name!r}; check the path, or give a hub name",
    )


@lru_cache
def query_hub(name: str) -> None:
    """Request the dataset's metadata, once per process; let the client's errors pass.

    Loading would retry for half a minute before it fails.
    """
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:  # offline, loading reads the cache or fails immediately
        HfApi().dataset_info(name, timeout=10)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
