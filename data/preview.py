"""Preview the first rows of the data, and whether the chat template supports `data.turns`, before a model loads."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data.chat.answer_spans import find_assistant_turns
from data.chat.template import check_template_arguments
from data.chat.tokenization import check_row_ids, documents_from_row
from data.config import DataConf, DataSource, TurnSelection
from data.sources.prepared_rows import read_answering_target
from data.sources.rows import Conversation, PlainText, TokenizedDocument
from data.sources.training_rows import check_data_exists, read_training_rows
from models.io.errors import UserError, run_checks
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer, read_vocab_size

PREVIEW_ROWS = 100
LAST_TURN_ONLY, DOCUMENT_PER_TURN = "the last turn of each", "one document per turn"
DOCUMENT_PER_CONVERSATION = "one document per conversation, because the chat template leaves earlier turns unchanged"
REWRITTEN_TURNS = f"{DOCUMENT_PER_TURN}, because the chat template rewrites earlier turns"


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The kind of rows that the data begins with."""

    kind: str
    turns: str = ""  # the documents made from a conversation of several turns
    is_author_unknown: bool = False  # True if the answers may not be the target's own


def preview_data(conf: DataConf, target: TargetConf, *checks: Callable[[], Any]) -> Preview:
    """Run the checks, then return what the first rows of the data are; raise one UserError for all failed checks.

    Rows are read last, because a download may take minutes. Raises UserError too if the chat template rejects all of
    them or does not allow data.turns, and for token ids beyond the target's vocabulary.
    """
    run_checks(*checks, lambda: check_data_exists(conf))
    if conf.source is DataSource.demo:
        return Preview(kind="prompts from the standard library's source and documentation")
    if conf.source is DataSource.captured:
        return Preview(kind="features of the target, stored by data.capture")
    if conf.template:
        check_template_arguments(load_tokenizer(target), conf.template, "data.template")
    rows = list(islice(read_training_rows(conf, Counter()), PREVIEW_ROWS))
    conversations = [row for row in rows if isinstance(row, Conversation)]
    if conversations:
        # Rows of several turns come first: they show what the template allows.
        conversations.sort(key=_is_single_turn)
        row, documents = _render_first(conversations, conf, target)
        descriptions = {TurnSelection.last: LAST_TURN_ONLY, TurnSelection.each: DOCUMENT_PER_TURN}
        turns = descriptions.get(conf.turns, DOCUMENT_PER_CONVERSATION if len(documents) == 1 else REWRITTEN_TURNS)
        return Preview(kind="conversations", turns="" if _is_single_turn(row) else turns, is_author_unknown=True)
    vocab_size = read_vocab_size(target)
    if any(isinstance(row, PlainText) for row in rows):
        return Preview(kind="plain texts, with every token supervised", is_author_unknown=True)
    for row in rows:
        if isinstance(row, TokenizedDocument):
            check_row_ids(row, vocab_size)
    if conf.source is DataSource.prepared:
        author = read_answering_target(Path(str(conf.path)), conf.split, load_tokenizer(target))
        return Preview(kind=f"answers by {author}, recorded by data.prepare")
    return Preview(kind="token ids, with a flag for each token of an answer")


def _render_first(
    rows: list[Conversation], conf: DataConf, target: TargetConf
) -> tuple[Conversation, list[TokenizedDocument]]:
    """Return the first row that gives a document, with its documents; raise UserError for none."""
    tokenizer, vocab_size = load_tokenizer(target), read_vocab_size(target)
    reasons: dict[str, str] = {}  # with the location of the first row
    for row in rows:
        documents, rejected = documents_from_row(row, conf, tokenizer, vocab_size)
        if documents:
            return row, documents
        reasons |= {reason: row.location for reason in rejected if reason not in reasons}
    listed = "; ".join(f"{reason} at {location}" for reason, location in reasons.items())
    raise UserError(
        f"data: some of the first {len(rows)} conversations must give a document, got none "
        f"({listed}); check the chat template, or the rows with `python -m data.show`"
    )


def _is_single_turn(row: Conversation) -> bool:
    return len(find_assistant_turns(row.messages)) <= 1
