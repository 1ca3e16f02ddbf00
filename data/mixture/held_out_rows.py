"""Held-out prompts as rows of a prompt file, built from documents or from a prepared folder.

A run writes them beside its checkpoint, where every command that evaluates it reads them.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConf, DataSource
from data.eval_prompts.hold_out import prompt_length, spread_over_categories
from data.mixture.filters import check_prompt_ids
from data.mixture.report import HELD_OUT, prompt_row_from_prepared
from data.packing.documents import Documents
from data.sources.prepared_rows import read_prepared_rows
from data.sources.prompt_formats import NO_CATEGORY
from data.sources.row_formats import RowRejectedError

log = logging.getLogger(__name__)
FINAL_FILE, SELECTION_FILE = "held_out.jsonl", "selection.jsonl"  # beside the checkpoint folder
PromptFileRow = dict[str, Any]


@dataclass(kw_only=True)
class HeldOutPrompts:
    """Prompts for choosing a checkpoint (`selection`) and for its report (`final`)."""

    selection: list[PromptFileRow] = field(default_factory=list)
    final: list[PromptFileRow] = field(default_factory=list)


def rows_from_documents(
    documents: Documents, numbers: list[int], origin: str
) -> list[PromptFileRow]:
    """Return the documents' prompts as the token ids that the draft would have trained on."""
    return [
        {
            "id": f"document-{number}",
            "category": document.category or NO_CATEGORY,
            "ids": document.ids[: prompt_length(np.array(document.answer, bool))],
            "chat_template": document.conversation is not None,
            "first_question_hash": f"{document.first_question:016x}",
            "held_out_of": origin,
        }
        for number, document in ((number, documents[number]) for number in numbers)
    ]


def rows_from_prepared(
    conf: DataConf, tokenizer: Any, count: int, max_tokens: int | None, vocab_size: int
) -> list[PromptFileRow]:
    """Return up to `count` prompts that data.prepare held out, spread over all categories."""
    folder, usable_rows = Path(str(conf.path)), []
    is_wanted = conf.source is DataSource.prepared and conf.split != HELD_OUT and count > 0
    if not (is_wanted and any(folder.glob(f"{HELD_OUT}-*.parquet"))):
        return []
    rejected: Counter[str] = Counter()
    for row in read_prepared_rows(folder, HELD_OUT):
        row.template = {**conf.template, **row.template}
        try:
            check_prompt_ids(row, tokenizer=tokenizer, max_tokens=max_tokens, vocab_size=vocab_size)
        except RowRejectedError as reason:
            rejected[str(reason)] += 1
        else:
            usable_rows.append(row)
    for reason, num_rejected in rejected.items():
        log.info("data: %d prompts held out from %s are left out: %s", num_rejected, folder, reason)
    _, category = np.unique([row.category for row in usable_rows], return_inverse=True)
    return [
        prompt_row_from_prepared(usable_rows[index])
        | {"held_out_of": f"{conf.path} by data.prepare"}
        for index in spread_over_categories(category, min(count, len(usable_rows)))
    ]


def format_data_name(conf: DataConf) -> str:
    """Return the name of the data in reports."""
    names = {
        DataSource.dataset: ":".join(filter(None, [conf.path, conf.subset, conf.split])),
        DataSource.captured: f"the feature store {conf.path}",
    }
    return names.get(conf.source, str(conf.path))
