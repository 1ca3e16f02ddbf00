"""The first rows of the data, looked at before a model is loaded.

They say what the data holds, and one conversation of several turns, rendered by the target's own
tokenizer, says whether the chat template can do what `data.turns` asks of it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from data.chat.answer_spans import turns
from data.chat.tokenization import from_row
from data.config import DataConf, Source, Turns
from data.sources.row_formats import Conversation, Row, Text
from data.sources.training_rows import check_there, rows
from models.errors import together
from models.target.target import TargetConf

LOOKED_AT = 100
LAST, EACH = "the last turn of each", "one document a turn"
KEEPS = "one document a conversation, whose earlier turns the chat template keeps as they were"
REWRITES = f"{EACH}, because the chat template rewrites earlier turns"


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Describe what the first rows of the data contain."""

    kind: str
    turns: str = ""  # what becomes of a conversation of several turns
    of_others: bool = False  # whether nothing says that the answers are the target's own


def first_rows(conf: DataConf) -> list[Row]:
    """Open the data and read a few of its rows. Raises UserError where it cannot be had or read.

    A feature store has documents of its own, and the demo only prompts: neither has rows.
    """
    conf.check_path()
    if conf.source in (Source.demo, Source.captured):
        return []
    return list(islice(rows(conf, Counter()), LOOKED_AT))


def rows_beside(conf: DataConf, *checks: Callable[[], Any]) -> list[Row]:
    """Run checks of what else is needed, then read first rows. Raises UserError for all at once.

    A data set is downloaded once nothing else is missing, as that may take minutes.
    """
    together(*checks, lambda: check_there(conf))
    return first_rows(conf)


def preview(conf: DataConf, target: TargetConf, first: list[Row]) -> Preview:
    """Describe these rows. Raises UserError for what the chat template of the target cannot do."""
    talks = [row for row in first if isinstance(row, Conversation)]
    if talks:
        several = [row for row in talks if len(turns(row.messages)) > 1]
        described = _describe_turns(conf, target, (several or talks)[0])
        return Preview(kind="conversations", turns=described if several else "", of_others=True)
    if any(isinstance(row, Text) for row in first):
        return Preview(kind="plain texts, every token of which is learned", of_others=True)
    kinds = {
        Source.demo: "prompts from the standard library's source and documentation",
        Source.captured: "features of the target, as data.capture kept them",
        Source.prepared: "answers by the target, as data.prepare recorded them",
    }
    return Preview(
        kind=kinds.get(conf.source, "token ids, with a flag for each token of an answer")
    )


def _describe_turns(conf: DataConf, target: TargetConf, row: Conversation) -> str:
    """Say how the turns become documents; return "" where the template refuses the row."""
    documents = list(from_row(row, conf, target.source.tokenizer(), Counter()))
    if not documents:
        return ""
    if conf.turns in (Turns.last, Turns.each):
        return LAST if conf.turns is Turns.last else EACH
    return KEEPS if len(documents) == 1 else REWRITES
