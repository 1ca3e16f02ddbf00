"""Rows as they stand in files and data sets, one after another, and which of them cannot be read.

JSON lines (.jsonl, .json, gzipped or not), one JSON array (.json), Parquet, a directory of such
files, a directory written by `save_to_disk`, a hub name. One batch of rows is in memory at a time.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import UserError

JSON_LINES, PARQUET = (".jsonl", ".jsonl.gz", ".json", ".json.gz"), (".parquet",)
SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk leaves in a directory
BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".arrow": "arrow"}
LINE_BYTES = 64 * 2**20  # a longer line is not read into memory
BATCH = 32  # rows of a table at a time: they may be of megabytes
LOCAL_REMEDY = (
    "without a network give a local path by {key}=FILE: a .jsonl, .json, .parquet or .arrow file, "
    "or a directory written by save_to_disk"
)
SPLIT_NAME = re.compile(r"(^|\+)\s*[^\[+]+")  # in train[1000:]+test


class Raw(NamedTuple):
    """A row and where it stands. None: it cannot be read, for the reason `fault`."""

    place: str
    row: dict[str, Any] | None
    fault: str = ""
    detail: str = ""


def open_rows(
    source: str, *, key: str, subset: str | None = None, split: str = "train",
    revision: str | None = None,
) -> Iterator[Raw]:  # fmt: skip
    """Open the source now, read it row by row. `key` is the setting that named it."""
    path = Path(source).expanduser()
    if found := files(path, split):
        return (raw for file in found for raw in file_rows(file, key))
    loaded = load(source, key=key, subset=subset, split=split, revision=revision)
    return table_rows(loaded, source)


def files(path: Path, word: str) -> list[Path]:
    """A file is itself; of a directory those whose name has the word, or all where none has."""
    if path.is_file() and path.suffix != ".arrow":
        return [path]
    if not path.is_dir() or any((path / name).exists() for name in SAVED):
        return []
    ours = (file for file in path.iterdir() if file.name.endswith(JSON_LINES + PARQUET))
    found = sorted(file for file in ours if not file.is_dir())
    named = re.compile(rf"(?<![a-z]){re.escape(word)}(?![a-z])", re.IGNORECASE)
    return [file for file in found if named.search(file.name)] or found


def is_rows(path: Path) -> bool:
    """Return whether `file_rows` can read the file."""
    return path.is_file() and path.name.endswith(JSON_LINES + PARQUET)


def count_rows(file: Path) -> int | None:
    """Rows of such a file, without reading what they hold; None for a JSON array."""
    if file.suffix in PARQUET:
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(file).num_rows
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        return None
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        return sum(1 for line in opened if line.strip())


def file_rows(file: Path, key: str) -> Iterator[Raw]:
    """Rows of one file. Raises UserError where the file as a whole is damaged."""
    try:
        yield from _parquet(file) if file.suffix in PARQUET else _json(file)
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise UserError(
            f"{key}: must be a readable file, got {file} ({first_line(error)}); "
            "check the path, or write the file again"
        ) from error


def _json(file: Path) -> Iterator[Raw]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        start = opened.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()
        if file.name.endswith((".json", ".json.gz")) and start[:1] == b"[":
            for number, row in enumerate(json.load(opened)):
                yield _object(f"{file}:[{number}]", row)
            return
        for number, line in enumerate(_lines(opened), 1):
            place = f"{file}:{number}"
            if line is None:
                yield Raw(place, None, "a line that is too long", f"over {LINE_BYTES:,} bytes")
            elif line.strip():
                yield _line(place, line)


def _lines(opened: Any) -> Iterator[bytes | None]:
    """Lines of a binary file; None stands for one that is too long."""
    while line := opened.readline(LINE_BYTES):
        if len(line) == LINE_BYTES and not line.endswith(b"\n"):
            while len(line) == LINE_BYTES and not line.endswith(b"\n"):
                line = opened.readline(LINE_BYTES)
            yield None
        else:
            yield line


def _line(place: str, line: bytes) -> Raw:
    try:
        return _object(place, json.loads(line.removeprefix(codecs.BOM_UTF8).decode()))
    except UnicodeDecodeError as error:
        return Raw(place, None, "a line that is not UTF-8", str(error))
    except (ValueError, RecursionError) as error:
        return Raw(place, None, "a line that is not JSON", str(error))


def _object(place: str, row: Any) -> Raw:
    if isinstance(row, dict):
        return Raw(place, row)
    return Raw(place, None, "a line that is not a JSON object", f"a {type(row).__name__}")


def _parquet(file: Path) -> Iterator[Raw]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        yield from _listed(table.iter_batches(batch_size=BATCH), str(file))


def table_rows(dataset: Any, name: str) -> Iterator[Raw]:
    """Rows of a Hugging Face data set."""
    return _listed(dataset.with_format("arrow").iter(batch_size=BATCH), name)


def _listed(batches: Iterable[Any], name: str) -> Iterator[Raw]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):  # only one row of them is to blame
            rows = [_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            place, number = f"{name}:[{number}]", number + 1
            if isinstance(row, dict):
                yield Raw(place, {key: _without_null(value) for key, value in row.items()})
            else:
                yield Raw(place, None, *row)


def _row(batch: Any) -> dict[str, Any] | tuple[str, str]:
    """The one row, or why Python cannot hold it."""
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return "text that is not UTF-8", str(error)
    except (ValueError, OverflowError) as error:  # of dates and durations
        return "a value that is out of range", str(error)


def _without_null(value: Any) -> Any:
    """Tables fill the keys that an object lacks with null; templates would take them for there."""
    if isinstance(value, dict):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


def load(
    source: str, *, key: str, subset: str | None, split: str, revision: str | None = None
) -> Any:
    """One split of a Hugging Face data set: a hub name, a saved directory, a data file."""
    from datasets import get_dataset_split_names, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    path = Path(source).expanduser()
    try:
        if (path / "state.json").is_file():
            return load_from_disk(str(path))
        if (path / "dataset_dict.json").is_file():
            return _split(load_from_disk(str(path)), split, key)
        if path.is_file() and path.suffix in BUILDERS:
            kind, only = BUILDERS[path.suffix], _split_of(split, ["train"])
            return load_dataset(kind, data_files=str(path), split=only)
        if path.is_dir():
            found = _split_of(split, get_dataset_split_names(str(path), subset))
            return load_dataset(str(path), name=subset, split=found)
        refuse_unreachable(source, key)
        return _from_hub(source, subset, split, revision)
    except (DatasetsError, OSError, ValueError) as error:
        group = key.rpartition(".")[0]
        raise UserError(
            f"{key}: must be a dataset that can be loaded, got {source!r} ({first_line(error)}); "
            f"check {group}.subset and {group}.split; {LOCAL_REMEDY.format(key=key)}"
        ) from error


def _split_of(split: str, names: list[str]) -> str:
    """Data with one split has no other to choose: the name is of the data set it was copied from.

    >>> _split_of("train_sft[1000:]", ["train"]), _split_of("train_sft", ["train", "test"])
    ('train[1000:]', 'train_sft')
    """
    return SPLIT_NAME.sub(rf"\1{names[0]}", split) if len(names) == 1 else split


def _split(splits: Any, split: str, key: str) -> Any:
    split = _split_of(split, list(splits))
    if split not in splits:
        setting = f"{key.rpartition('.')[0]}.split"
        raise UserError(f"{setting}: must be one of {', '.join(splits)}, got {split!r}")
    return splits[split]


@lru_cache(maxsize=2)  # a run looks at its data several times, and the hub counts requests
def _from_hub(name: str, subset: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(name, name=subset, split=split, revision=revision)


def refuse_unreachable(name: str, key: str) -> None:
    """Raise UserError for a data set that the hub does not have, or does not answer for."""
    from huggingface_hub.errors import HTTPError

    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in BUILDERS:
        raise UserError(f"{key}: must exist, got {name!r}; check the path, or give a hub name")
    try:
        ask_hub(name)
    except HTTPError as error:
        raise UserError(
            f"{key}: must be a reachable hub name, got {name!r} ({first_line(error)}); "
            f"set HF_HUB_OFFLINE=1 to use a copy in the cache; {LOCAL_REMEDY.format(key=key)}"
        ) from error


@lru_cache
def ask_hub(name: str) -> None:
    """One quick question: loading would retry for half a minute before it gives up."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:  # offline, loading looks in the cache and fails at once
        HfApi().dataset_info(name, timeout=10)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
