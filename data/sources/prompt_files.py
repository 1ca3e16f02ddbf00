"""Rows of prompt files: JSONL, JSON, Parquet, a directory of them, or a Hugging Face dataset."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.sources.files import (
    JSON_LINES,
    PARQUET,
    SAVED,
    Raw,
    ask_hub,
    file_rows,
    files,
    first_line,
    table_rows,
)
from models.errors import UserError

SPLITS = ("test", "validation", "train")  # the first that a dataset has is what is held out


def rows_of(source: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a row stands, for messages about it, and the row."""
    for place, row, fault, detail in _opened(source, key):
        if row is None:
            raise UserError(
                f"{key}: every line must be a JSON object, got {place}: {detail or fault}"
            )
        yield place, row


def _opened(source: str, key: str) -> Iterator[Raw]:
    path = Path(source).expanduser()
    if path.is_dir() and any((path / name).exists() for name in SAVED):
        return _dataset(str(path), key, saved=True)
    if path.exists():
        found = files(path, "test")
        if not found:
            raise UserError(f"{key}: must hold JSONL, JSON or Parquet files, got none in {path}")
        return (raw for file in found for raw in file_rows(file, key))
    if _hub_name(source):
        return _dataset(source, key)
    raise UserError(f"{key}: must be a readable JSONL file, got {source}; demo takes the demo's")


def _hub_name(source: str) -> bool:
    name = source.partition(":")[0]
    local = name.startswith(("/", ".", "~")) or name.endswith(JSON_LINES + PARQUET)
    return name.count("/") == 1 and not local


def _dataset(source: str, key: str, *, saved: bool = False) -> Iterator[Raw]:
    from datasets import Dataset, load_dataset, load_from_disk

    name, _, rest = source.partition(":")
    subset, _, split = rest.partition(":")
    try:
        if saved:
            found: Any = load_from_disk(source)
        else:
            ask_hub(name)
            found = load_dataset(name, subset or None)
    except Exception as error:  # whatever the hub and its client say, in one line
        raise UserError(
            f"{key}: must be a dataset that can be loaded, got {source!r} "
            f"({first_line(error)}); without a network give a local path"
        ) from error
    if not isinstance(found, Dataset):
        chosen = split or next((split for split in SPLITS if split in found), next(iter(found)))
        if chosen not in found:
            raise UserError(f"{key}: split must be one of {', '.join(found)}, got {chosen}")
        found = found[chosen]
    return table_rows(found, source)
