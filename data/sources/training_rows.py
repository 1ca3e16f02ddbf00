"""Read the rows that training uses: from a file, a dataset or a prepared folder.

A row that cannot be used is skipped and counted by its reason, never silently.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from huggingface_hub import constants

from data.config import DataConf, DataSource
from data.sources.files import JSON_SUFFIXES, PARQUET_SUFFIXES, RawRow, count_rows
from data.sources.open_rows import (
    check_hub_dataset,
    check_source_path,
    list_source_files,
    load_dataset_split,
    open_rows,
)
from data.sources.prepared_rows import HELD_OUT, list_prepared_files, parse_prepared_row, read_prepared_rows
from data.sources.row_formats import NO_ANSWER, parse_row, truncate_to_last_answer
from data.sources.rows import Conversation, ParsedRow, RowRejectedError
from data.sources.splits import list_split_names
from models.io.console import log_once
from models.io.errors import UserError, require, run_checks
from models.io.files import hash_file
from models.targets.config import ModelSource
from models.targets.load_errors import check_hub

log = logging.getLogger(__name__)


def check_reachable(conf: DataConf, *models: ModelSource | None) -> None:
    """Check that data and models are there or on the hub, before PyTorch is imported; raise one UserError for all."""
    data = partial(check_data_exists, conf, opens_cache=False)  # opening it may take minutes
    run_checks(*(partial(check_hub, source) for source in models), data)


PATH_OF_SOURCE = {
    DataSource.captured: "the folder of data.capture",
    DataSource.prepared: "the folder of data.prepare",
    DataSource.jsonl: "data.path=FILE",
}


def check_data_exists(conf: DataConf, *, opens_cache: bool = True) -> None:
    """Check that the data exists, on the hub too, without a download; raise UserError otherwise."""
    require(  # not in DataConf, because plans need no path
        conf.source is DataSource.demo or conf.path is not None,
        f"data.path: must be set for data.source={conf.source.value}, got null; give "
        + PATH_OF_SOURCE.get(conf.source, "data.path=FILE or a hub name"),
    )
    name, path = str(conf.path), Path(str(conf.path))
    if conf.source is DataSource.jsonl:
        require(path.is_file(), f"data.path: must be a JSONL file, got {name}; check the path")
    elif conf.source is DataSource.prepared:
        list_prepared_files(path, conf.split)
    elif conf.source is DataSource.dataset:
        check_source_path(name, "data.path")
        if not path.exists() and not constants.HF_HUB_OFFLINE:
            check_hub_dataset(name, "data.path")
        elif not path.exists() and opens_cache:
            # The dataset is in the cache, or the error of opening it names what is missing.
            read_training_rows(conf, Counter())


def iter_content_hashes(conf: DataConf) -> Iterator[tuple[str, str]]:
    """Yield the name and a hash of each file of the data, or of a dataset of the hub."""
    path = Path(str(conf.path))
    if not path.exists():
        dataset = load_dataset_split(str(conf.path), key="data.path", subset=conf.subset, split=conf.split)
        yield str(conf.path), dataset._fingerprint
        return
    for file in _list_files(conf):
        yield str(file.relative_to(path.parent)), hash_file(file)


def _list_files(conf: DataConf) -> list[Path]:
    """List the files of a local source."""
    if conf.source is DataSource.prepared:
        return [*chain.from_iterable(list_prepared_files(Path(str(conf.path)), conf.split).values())]
    return list_source_files(str(conf.path), conf.split, conf.subset)


def count_training_rows(conf: DataConf) -> int | None:
    """Count the rows of local files, including unusable ones; None if that takes parsing them."""
    files = _list_files(conf)
    is_whole = "[" not in conf.split and conf.limit is None
    suffixes = JSON_SUFFIXES + PARQUET_SUFFIXES
    if not files or not is_whole or not all(file.name.endswith(suffixes) for file in files):
        return conf.limit
    counts = [count_rows(file, "data.path") for file in files]
    return None if None in counts else sum(filter(None, counts))


def read_training_rows(conf: DataConf, skipped: Counter[str]) -> Iterator[ParsedRow]:
    """Return a lazy iterator over the rows of the data.

    A dataset is loaded immediately, files are opened with the first row. `skipped` is filled with counts by reason.
    """
    if conf.source is DataSource.demo or conf.path is None:
        raise ValueError("the demo has prompts, not rows")
    if conf.source is DataSource.prepared:
        return _read_prepared(Path(conf.path), conf, skipped)
    rows = open_rows(conf.path, key="data.path", subset=conf.subset, split=conf.split)
    return _parse_rows(rows, conf, skipped)


def _read_prepared(folder: Path, conf: DataConf, skipped: Counter[str]) -> Iterator[ParsedRow]:
    num_rows = 0
    for number, row in enumerate(islice(read_prepared_rows(folder, conf.split), conf.limit)):
        try:
            documents = list(parse_prepared_row(row, conf.turns))
        except RowRejectedError as error:
            skipped[str(error)] += 1
            continue
        conversation = None if row.messages is None else number
        for document in documents:
            num_rows += 1
            yield replace(document, location=f"{folder}, row {row.id}", conversation=conversation)
    require(
        num_rows > 0,
        f"data.path: some row must have an answer, got none in {folder}; "
        + (
            "only rows to train on are answered, data.split=train"
            if HELD_OUT in list_split_names(conf.split)
            else "run data.prepare with answers=target"
        ),
    )


def _parse_rows(raw_rows: Iterator[RawRow], conf: DataConf, skipped: Counter[str]) -> Iterator[ParsedRow]:
    num_rows, num_shortened, details = 0, 0, {}
    for location, raw, reason, detail in islice(raw_rows, conf.limit):
        if raw is None:
            raise UserError(
                f"data.path: every line must be a JSON object, got {detail or reason} at "
                f"{location}; fix or remove the line"
            )
        try:
            row = truncate_to_last_answer(parse_row(raw, conf.format, conf.column))
        except RowRejectedError as error:
            skipped[str(error)] += 1
            details.setdefault(str(error), error.detail and f" ({error.detail})")
            continue
        if isinstance(row, Conversation):
            row.conversation = num_rows
            num_shortened += row.num_left_out > 0
        row.location = location
        num_rows += 1
        yield row
    if num_shortened:
        log_once(log, f"{conf.path}: {num_shortened} rows begin with an answer, which is left out")
    require(
        bool(num_rows or skipped), f"data.path: must hold rows, got none in {conf.path}; check the path and data.split"
    )
    require(
        num_rows > 0 or set(skipped) != {NO_ANSWER},
        f"data.path: some row must have an answer, got none in {conf.path}; data.prepare has the target answer them "
        "(answers=target)",
    )
    if not num_rows:
        reasons = ", ".join(f"{key}{details[key]}: {n}" for key, n in skipped.most_common(3))
        key = "data.column" if conf.column else "data.format"
        raise UserError(
            f"{key}: some row must have the format {conf.format.value}, "
            f"got none in {conf.path} ({reasons}); set data.format and data.column"
        )
