"""Held-out prompts as rows of a prompt file: from documents, or from a prepared folder.

A run keeps them beside its checkpoint, and every command that judges it reads them there.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConf, Source
from data.eval_prompts.hold_out import prompt_size, spread
from data.mixture.limits import fitting
from data.mixture.report import HELD_OUT, prompt_row
from data.packing.documents import Documents
from data.sources.prepared_rows import Row, read
from data.sources.row_formats import MisfitError

log = logging.getLogger(__name__)
FINAL, SELECTION = "held_out.jsonl", "selection.jsonl"  # beside the checkpoint's folder
PromptRow = dict[str, Any]


@dataclass(kw_only=True)
class HeldOut:
    """Rows of the prompts that choose a checkpoint, and of those that its report is made of."""

    selection: list[PromptRow] = field(default_factory=list)
    final: list[PromptRow] = field(default_factory=list)


def document_rows(documents: Documents, numbers: list[int], origin: str) -> list[PromptRow]:
    """The prompts of these documents, token by token as the draft would have learned them."""
    return [
        {
            "id": f"document-{number}",
            "category": document.category or "all",
            "ids": document.ids[: prompt_size(np.array(document.answer, bool))],
            "chat_template": document.conversation is not None,
            "held_out_of": origin,
        }
        for number, document in ((number, documents[number]) for number in numbers)
    ]


def prepared_rows(
    conf: DataConf, tokenizer: Any, count: int, longest: int | None
) -> list[PromptRow]:
    """At most `count` prompts that data.prepare held out of this data, in all its categories."""
    if conf.source is not Source.prepared or conf.split == HELD_OUT or not count:
        return []
    folder, found = Path(str(conf.path)).expanduser(), []
    if not any(folder.glob(f"{HELD_OUT}-*.parquet")):
        return []
    fits, left_out = fitting(tokenizer, longest), Counter[str]()
    for row in read(folder, HELD_OUT):
        row.template = {**conf.template, **row.template}
        try:
            fits(row)
        except MisfitError as reason:
            left_out[str(reason)] += 1
        else:
            found.append(row)
    for reason, number in left_out.items():
        log.info("data: %d prompts held out of %s are left out: %s", number, folder, reason)
    return [_prepared_row(row, conf) for row in _spread(found, count)]


def _spread(rows: list[Row], count: int) -> list[Row]:
    _, category = np.unique([row.category for row in rows], return_inverse=True)
    return [rows[place] for place in spread(category, min(count, len(rows)))]


def _prepared_row(row: Row, conf: DataConf) -> PromptRow:
    return {**prompt_row(row), "held_out_of": f"{conf.path} by data.prepare"}


def name_of(conf: DataConf) -> str:
    """Name the data as a report does."""
    if conf.source is Source.dataset:
        return ":".join(filter(None, [conf.path, conf.subset, conf.split]))
    return f"the feature store {conf.path}" if conf.source is Source.captured else str(conf.path)
