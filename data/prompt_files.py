"""Rows of prompt files: JSONL, JSON, Parquet, a directory of them, or a Hugging Face dataset."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.errors import UserError

JSON_LINES, PARQUET = (".jsonl", ".jsonl.gz", ".json"), (".parquet",)
TEST = re.compile(r"(?<![a-z])test(?![a-z])", re.IGNORECASE)  # a word, not `latest`
SPLITS = ("test", "validation", "train")  # the first that a dataset has is what is held out


def rows_of(source: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a row stands, for messages about it, and the row."""
    path = Path(source).expanduser()
    if path.is_dir() and any(
        (path / name).exists() for name in ("state.json", "dataset_dict.json")
    ):
        yield from _dataset(str(path), key, saved=True)
    elif path.exists():
        for file in _files(path, key):
            yield from _parquet(file, key) if file.suffix in PARQUET else _json(file, key)
    elif _hub_name(source):
        yield from _dataset(source, key)
    else:
        raise UserError(
            f"{key}: must be a readable JSONL file, got {source}; null takes the demo's"
        )


def _files(path: Path, key: str) -> list[Path]:
    """A file is itself; of a directory those of the test split, or all where no name says test."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(JSON_LINES + PARQUET))
    if not found:
        raise UserError(f"{key}: must hold JSONL, JSON or Parquet files, got none in {path}")
    return [file for file in found if TEST.search(file.name)] or found


def _json(file: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rt", encoding="utf-8") as lines:
            content = lines.read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise UserError(
            f"{key}: must be a readable JSONL file, got {file}; null takes the demo's"
        ) from error
    if file.suffix == ".json" and content.lstrip().startswith("["):
        listed = _parsed(content, str(file), key)
        yield from ((f"{file}:[{index}]", row) for index, row in enumerate(listed))
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"{file}:{number}", _parsed(line, f"{file}:{number}", key)


def _parsed(text: str, place: str, key: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{key}: every line must be JSON, got {place}: {error}") from error


def _parquet(file: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet

    try:
        listed = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}: must be a readable Parquet file, got {file} ({_first_line(error)})"
        ) from error
    yield from ((f"{file}:[{index}]", row) for index, row in enumerate(listed))


def _hub_name(source: str) -> bool:
    name = source.partition(":")[0]
    local = name.startswith(("/", ".", "~")) or name.endswith(JSON_LINES + PARQUET)
    return name.count("/") == 1 and not local


def _dataset(source: str, key: str, *, saved: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import Dataset, load_dataset, load_from_disk

    name, _, rest = source.partition(":")
    subset, _, split = rest.partition(":")
    try:
        if saved:
            found: Any = load_from_disk(source)
        else:
            _ask_hub(name)
            found = load_dataset(name, subset or None)
    except Exception as error:  # whatever the hub and its client say, in one line
        raise UserError(
            f"{key}: must be a dataset that can be loaded, got {source!r} "
            f"({_first_line(error)}); without a network give a local path"
        ) from error
    if not isinstance(found, Dataset):
        chosen = split or next((split for split in SPLITS if split in found), next(iter(found)))
        if chosen not in found:
            raise UserError(f"{key}: split must be one of {', '.join(found)}, got {chosen}")
        found = found[chosen]
    yield from ((f"{source}[{index}]", dict(row)) for index, row in enumerate(found))


def _ask_hub(name: str) -> None:
    """One quick question: loading would retry for half a minute before it gives up."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:  # offline, loading looks in the cache and fails at once
        HfApi().dataset_info(name, timeout=10)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
