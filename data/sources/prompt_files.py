"""Read prompt files: JSONL, JSON, Parquet, a directory of them, or a Hugging Face dataset."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.sources.files import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    SAVED_DATASET_FILES,
    RawRow,
    first_line,
    list_data_files,
    query_hub,
    read_dataset_rows,
    read_file_rows,
)
from models.errors import UserError, require

# The first of these splits that a dataset has is read: prompts should be held-out data.
SPLIT_PREFERENCE = ("test", "validation", "train")


def read_prompt_file(source: str, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its location, which error messages about the row cite.

    Raises UserError, headed by the setting `key`, where a row cannot be read.
    """
    for location, row, reason, detail in _open_prompt_rows(source, key):
        if row is None:
            raise UserError(
                f"{key}: every line must be a JSON object, got {location}: {detail or reason}"
            )
        yield location, row


def _open_prompt_rows(source: str, key: str) -> Iterator[RawRow]:
    path = Path(source).expanduser()
    if path.is_dir() and any((path / name).exists() for name in SAVED_DATASET_FILES):
        return _open_dataset(str(path), key, saved=True)
    if path.exists():
        files = list_data_files(path, "test")
        require(bool(files), f"{key}: must hold JSONL, JSON or Parquet files, got none in {path}")
        return (raw for file in files for raw in read_file_rows(file, key))
    name = source.partition(":")[0]
    is_path = name.startswith(("/", ".", "~")) or name.endswith(JSON_SUFFIXES + PARQUET_SUFFIXES)
    require(
        name.count("/") == 1 and not is_path,
        f"{key}: must be a readable JSONL file, got {source}; demo reads the demo's",
    )
    return _open_dataset(source, key)


def _open_dataset(source: str, key: str, *, saved: bool = False) -> Iterator[RawRow]:
    from datasets import Dataset, load_dataset, load_from_disk

    name, _, suffix = source.partition(":")
    subset, _, split = suffix.partition(":")
    try:
        if saved:
            dataset: Any = load_from_disk(source)
        else:
            query_hub(name)
            dataset = load_dataset(name, subset or None)
    except Exception as error:  # the hub and its client raise many types
        raise UserError(
            f"{key}: must be a dataset that can be loaded, got {source!r} "
            f"({first_line(error)}); without a network give a local path"
        ) from error
    if not isinstance(dataset, Dataset):
        name = split or next(name for name in (*SPLIT_PREFERENCE, *dataset) if name in dataset)
        require(name in dataset, f"{key}: split must be one of {', '.join(dataset)}, got {name}")
        dataset = dataset[name]
    return read_dataset_rows(dataset, source)
