"""Where training's documents come from: a file, a data set, a prepared folder.

A row that does not fit is left out and counted by its reason, never silently.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from data.config import DataConf, Source
from data.sources.files import (
    Raw,
    count_rows,
    file_rows,
    is_rows,
    load,
    refuse_unreachable,
    table_rows,
)
from data.sources.prepared_rows import learned, read
from data.sources.row_formats import THOUGHTS, Conversation, MisfitError, Row, shape
from models.errors import UserError


def check(conf: DataConf) -> None:
    """Refuse data that cannot be had or read. Reads one row, needs no model."""
    conf.check_path()
    if conf.source not in (Source.demo, Source.captured):
        next(rows(conf, Counter()), None)


def check_there(conf: DataConf) -> None:
    """Refuse data that is not there. The hub is asked for its data sets; nothing is downloaded."""
    conf.check_path()
    if conf.source not in (Source.dataset, Source.jsonl) or conf.path is None:
        return
    if Path(conf.path).expanduser().exists():
        return
    if conf.source is Source.dataset and not constants.HF_HUB_OFFLINE:
        refuse_unreachable(conf.path, "data.path")
    else:  # it is in the cache, or the error says what is missing
        rows(conf, Counter())


def count(conf: DataConf) -> int | None:
    """Rows of the data, those that do not fit included; None where only reading them all tells."""
    if conf.source not in (Source.dataset, Source.jsonl) or conf.path is None:
        return None
    file = Path(conf.path).expanduser()
    if is_rows(file) and "[" not in conf.split:
        number = count_rows(file)
    else:
        number = len(load(conf.path, key="data.path", subset=conf.subset, split=conf.split))
    return number if number is None or conf.limit is None else min(number, conf.limit)


def rows(conf: DataConf, skipped: Counter[str]) -> Iterator[Row]:
    """Open the data now, read it row by row; `skipped` counts the rows left out, by reason."""
    if conf.source is Source.demo or conf.path is None:
        raise ValueError("the demo has prompts, not rows")
    if conf.source is Source.prepared:
        return _prepared(Path(conf.path).expanduser(), conf, skipped)
    return _fitting(_opened(conf, conf.path), conf, skipped)


def _prepared(folder: Path, conf: DataConf, skipped: Counter[str]) -> Iterator[Row]:
    fits = 0
    for number, row in enumerate(islice(read(folder, conf.split), conf.limit)):
        try:
            found = list(learned(row, conf.turns))
        except MisfitError as reason:
            skipped[str(reason)] += 1
            continue
        if row.messages is not None:
            found = [replace(each, conversation=number) for each in found]
        fits += len(found)
        yield from found
    if not fits:
        raise UserError(
            f"data.path: some row must have an answer to learn, got none in {folder}; "
            "run data.prepare with answers=target or answers=endpoint"
        )


def _opened(conf: DataConf, path: str) -> Iterator[Raw]:
    file = Path(path).expanduser()
    if conf.source is Source.dataset and not (is_rows(file) and "[" not in conf.split):
        loaded = load(path, key="data.path", subset=conf.subset, split=conf.split)
        return table_rows(loaded, path)
    if not file.is_file():
        raise UserError(f"data.path: must be a JSONL file, got {path}; check the path")
    return file_rows(file, "data.path")


def _fitting(raw_rows: Iterator[Raw], conf: DataConf, skipped: Counter[str]) -> Iterator[Row]:
    fits, details = 0, {}
    for place, raw, fault, detail in islice(raw_rows, conf.limit):
        if raw is None:
            raise UserError(
                f"data.path: every line must be a JSON object, got {detail or fault} at {place}; "
                "mend or remove the line"
            )
        try:
            row = learnable(shape(raw, conf.format, conf.column))
        except MisfitError as error:
            skipped[str(error)] += 1
            details.setdefault(str(error), error.detail and f" {error.detail}")
            continue
        if isinstance(row, Conversation):
            row.conversation = fits
        fits += 1
        yield row
    if not fits:
        reasons = ", ".join(f"{why}{details[why]}: {n}" for why, n in skipped.most_common(3))
        raise UserError(
            f"data.format: some row must have the shape {conf.format.value}, "
            f"got none in {conf.path} ({reasons or 'no rows'}); set data.format and data.column"
        )


def learnable(row: Row) -> Row:
    """A conversation up to its last answer: nothing is learned from what follows."""
    if not isinstance(row, Conversation):
        return row
    answers = [turn for turn, m in enumerate(row.messages, 1) if m["role"] == "assistant"]
    if not answers:
        raise MisfitError("no assistant turn")
    if not all(map(_says, row.messages)):
        raise MisfitError("an empty turn")
    return replace(row, messages=row.messages[: answers[-1]])


def _says(message: dict[str, Any]) -> bool:
    """Whether an assistant said anything: an empty turn waits for an answer."""
    spoken = ("content", "tool_calls", *THOUGHTS)
    return message["role"] != "assistant" or any(message.get(name) for name in spoken)
