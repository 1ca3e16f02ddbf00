"""Open the rows of a source: files, a directory of files, a saved dataset, or a hub name."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import xxhash

from data.sources.files import JSON_SUFFIXES, PARQUET_SUFFIXES, RawRow, count_rows, read_dataset_rows, read_file_rows
from data.sources.splits import check_split_names, list_split_names, rename_single, resolve_split, select_split
from models.io.console import log_once
from models.io.errors import UserError, first_line, require

log = logging.getLogger(__name__)
SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")  # written by save_to_disk
DESCRIBING_FILES = ("dataset_info.json", "dataset_infos.json")  # of a data set of the hub: they hold no rows
SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")
DATA_SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES, ".arrow")
UNREAD_SUFFIXES = (".csv", ".tsv", ".zst", ".xz", ".bz2")
# Prompts to evaluate on should be held-out data.
SPLIT_PREFERENCE = ("test", "validation", "train")
LOCAL_REMEDY = (
    "without a network give a local path by {key}=FILE: a .jsonl, .json, .parquet or .arrow file, "
    "or a directory written by save_to_disk"
)


def open_rows(
    source: str, *, key: str, subset: str | None = None, split: str = "train", revision: str | None = None
) -> Iterator[RawRow]:
    """Resolve the source immediately and return a lazy iterator over its rows.

    `subset` and `revision` concern only datasets. Error messages begin with `key`, the setting that named the source.
    """
    if files := _list_files(source, key, subset, split):
        return read_split(split, files, key)
    dataset = load_dataset_split(source, key=key, subset=subset, split=split, revision=revision)
    return read_dataset_rows(dataset, source)


def _list_files(source: str, key: str, subset: str | None, split: str) -> dict[str, list[Path]]:
    """Return a local source's files of each name in the split; none for a dataset and a missing path."""
    path = Path(source)
    files = {name: list_split_files(path, name) for name in list_split_names(split)}
    if not all(files.values()) or (path.is_dir() and subset is not None):
        return {}
    require(
        len(set(map(tuple, files.values()))) == len(files),
        f"{_split_key(key)}: must name a single split of {source}, which has one, got {split!r}",
    )
    return files


def read_split(split: str, files: dict[str, list[Path]], key: str) -> Iterator[RawRow]:
    """Return an iterator over a split, whose names have these files; raise UserError if it cannot be parsed."""
    parts: list[tuple[str, int, int | None]] = [(name, 0, None) for name in list_split_names(split)]
    if "[" in split:
        counts = {name: sum(_count_parsed_rows(file, key) for file in paths) for name, paths in files.items()}
        parts = [*resolve_split(split, counts, _split_key(key))]
    return chain.from_iterable(
        islice(chain.from_iterable(read_file_rows(file, key) for file in files[name]), begin, end)
        for name, begin, end in parts
    )


def _split_key(key: str) -> str:
    """Return the name of the split's setting, which stands beside the source's."""
    return f"{key.rpartition('.')[0]}.split"


def _count_parsed_rows(file: Path, key: str) -> int:
    count = count_rows(file, key)
    return sum(1 for _ in read_file_rows(file, key)) if count is None else count


def list_data_files(path: Path, word: str) -> list[Path]:
    """List the data files at a path: the file itself, or the files of a directory.

    Of a directory these are the files whose names contain the word, else those that name no split, else all; none for
    datasets and missing paths.
    """
    if path.is_file() and path.suffix != ".arrow":
        return [path]
    if not path.is_dir() or any((path / name).exists() for name in SAVED_DATASET_FILES):
        return []
    files = sorted(
        file
        for file in path.iterdir()
        if _has_suffix(file, JSON_SUFFIXES + PARQUET_SUFFIXES)
        and file.name not in DESCRIBING_FILES
        and not file.is_dir()
    )
    named = [file for file in files if _has_word(file, word)]
    listed = named or [file for file in files if not any(_has_word(file, other) for other in SPLIT_WORDS)] or files
    below = sorted(f for f in path.rglob("*") if f.is_file() and f.name not in DESCRIBING_FILES) if listed else []
    others = [file for file in below if _has_suffix(file, DATA_SUFFIXES + UNREAD_SUFFIXES) and file not in listed]
    if others:
        read, left = (f"{paths[0].relative_to(path)} ({len(paths)} files)" for paths in (listed, others))
        log_once(log, f"{path}: {word} is read from {read}, not from {left}")
    return listed


def _has_suffix(file: Path, suffixes: tuple[str, ...]) -> bool:
    return file.name.lower().endswith(suffixes)


def list_split_files(path: Path, name: str) -> list[Path]:
    """List the files of a split as `list_data_files`; none also if a directory has other splits but not this one."""
    files = list_data_files(path, name)
    is_known = not path.is_dir() or any(_has_word(file, name) for file in files)
    return files if not files or is_known or len(_find_splits(path)) <= 1 else []


def list_source_files(source: str, split: str, subset: str | None = None) -> list[Path]:
    """List the files that a local source reads: all below a directory that `datasets` reads."""
    if files := _list_files(source, "data.path", subset, split):
        return [*dict.fromkeys(chain.from_iterable(files.values()))]
    path = Path(source)
    return sorted(filter(Path.is_file, [path, *path.rglob("*")]))


def _has_word(file: Path, word: str) -> bool:
    return bool(re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", file.name, re.IGNORECASE))


def _find_splits(path: Path) -> list[str]:
    """Return the names of a directory's splits, as `datasets` tells them from the files' names."""
    from datasets import get_dataset_split_names

    with suppress(OSError, RuntimeError, ValueError):  # names that the library does not take, and loading scripts
        return get_dataset_split_names(str(path))
    return []


def load_dataset_split(
    source: str, *, key: str, subset: str | None, split: str | None, revision: str | None = None, split_key: str = ""
) -> Any:
    """Return one split of a Hugging Face dataset: a hub name, a saved directory or a data file.

    Without `split`, return the first of SPLIT_PREFERENCE that the dataset has. Errors name the settings by their keys.
    """
    path = Path(source)
    split_key = split_key or _split_key(key)
    check_source_path(source, key)
    from datasets import get_dataset_split_names, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if any((path / name).is_file() for name in SAVED_DATASET_FILES):
            saved: Any = load_from_disk(str(path))
            tables: Any = saved if isinstance(saved, dict) else {"train": saved}
        elif path.is_file():  # the only files that `list_data_files` leaves to the library
            tables = load_dataset("arrow", data_files=str(path))
        elif path.is_dir():
            names = get_dataset_split_names(str(path), subset)
            split = rename_single(split or "train", names)
            check_split_names(split, names, split_key)
            return load_dataset(str(path), name=subset, split=split, cache_dir=_choose_cache(path))
        else:
            check_hub_dataset(source, key)
            tables = _load_from_hub(source, subset, split, revision)
            if split is not None:
                return tables
        preferred = next(name for name in (*SPLIT_PREFERENCE, *tables) if name in tables)
        return select_split(tables, split or preferred, split_key)
    except (DatasetsError, OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loading script
        raise UserError(
            f"{key}: must be a dataset that can be loaded, got {source!r} ({first_line(error.__cause__ or error)}); "
            f"check {split_key} and the subset beside it; {LOCAL_REMEDY.format(key=key)}"
        ) from error


def _choose_cache(folder: Path) -> str:
    """Return a cache for the files of a folder as they are: the default would keep old ones that a README lists."""
    from datasets import config

    stats = {str(file.relative_to(folder)): file.stat() for file in sorted(folder.rglob("*")) if file.is_file()}
    files = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
    return str(Path(config.HF_DATASETS_CACHE, "folders", xxhash.xxh3_128_hexdigest(json.dumps(files).encode())))


@lru_cache(maxsize=2)  # a run opens its data several times, and the hub limits requests
def _load_from_hub(name: str, subset: str | None, split: str | None, revision: str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(name, name=subset, split=split, revision=revision)


@lru_cache  # once per process: loading would retry for half a minute before it fails
def check_hub_dataset(name: str, key: str) -> None:
    """Check that the hub is reachable and has the dataset; raise UserError otherwise."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, HTTPError

    if constants.HF_HUB_OFFLINE:  # loading reads the cache or fails immediately
        return
    try:
        HfApi().dataset_info(name, timeout=10)
    except (HFValidationError, HTTPError) as error:
        raise UserError(
            f"{key}: must be a reachable hub name, got {name!r} ({first_line(error)}); "
            f"set HF_HUB_OFFLINE=1 to use a copy in the cache; {LOCAL_REMEDY.format(key=key)}"
        ) from error


def check_source_path(name: str, key: str) -> None:
    """Raise UserError for what does not exist and can only be a path."""
    is_path = name.startswith(("/", ".", "~")) or name.endswith(DATA_SUFFIXES)
    require(
        Path(name).exists() or (not is_path and name.count("/") <= 1),
        f"{key}: must exist, got {name!r}; check the path, or give a hub name",
    )
