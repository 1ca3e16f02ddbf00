"""The forms that a row of data is parsed into, and the error of a row that is rejected."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.io.errors import require

LABELS = ("category", "language", "conversation", "first_question")


@dataclass(kw_only=True)
class LabeledRow:
    """The labels by which metrics are grouped; empty if the row has no label.

    `conversation` is the number of the row that a chat template renders; all documents of one conversation share it. It
    is None for plain texts and for token ids. `first_question` is a hash, 0 if unknown, and `location` is for errors.
    """

    category: str = ""
    language: str = ""
    conversation: int | None = None
    first_question: int = 0
    location: str = field(default="", compare=False)


@dataclass(kw_only=True)
class Conversation(LabeledRow):
    """The messages of a conversation, and the other inputs of its chat template.

    The last message has `finish_reason: length` if that answer ended at its limit of tokens, not by itself.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template
    # turns before the first question, which are left out
    num_left_out: int = field(default=0, compare=False)


@dataclass(kw_only=True)
class PlainText(LabeledRow):
    """A plain text without roles."""

    text: str


@dataclass(kw_only=True)
class TokenizedDocument(LabeledRow):
    """Token ids, with a flag for each that is True for answer tokens."""

    ids: list[int]
    answer: list[bool]


ParsedRow = Conversation | PlainText | TokenizedDocument


class RowRejectedError(Exception):
    """The error of a row that cannot be used; `str(error)` is the reason it is counted under."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail


def require_row(holds: bool, reason: str) -> None:
    """Raise RowRejectedError with `reason` unless the condition holds."""
    if not holds:
        raise RowRejectedError(reason)


def require_unicode(value: Any) -> None:
    """Raise RowRejectedError for half of a surrogate pair: JSON can escape it, but tokenizers and files take none."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise RowRejectedError("half of a surrogate pair", error.reason) from error


def require_embeddings(ids: Sequence[int], vocab_size: int | None) -> None:
    """Raise RowRejectedError for a token id that the target has no embedding for.

    A tokenizer may have tokens that the model was not resized for. None for `vocab_size` checks nothing.
    """
    if vocab_size is not None and ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        unknown = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RowRejectedError(f"token {unknown} has no embedding in the target", str(unknown))


def document_from_spans(ids: list[int], spans: Iterable[Sequence[int]]) -> TokenizedDocument:
    """Build a document whose tokens in the spans [begin, end) are answer tokens.

    Raises RowRejectedError for spans outside the ids, UserError for a document without a prompt.
    """
    answer = [False] * len(ids)
    for begin, end in spans:
        require_row(0 <= begin <= end <= len(ids), "recorded spans that do not lie in the ids")
        answer[begin:end] = [True] * (end - begin)
    return check_has_prompt(TokenizedDocument(ids=ids, answer=answer))


def document_from_pair(prompt_ids: list[int], answer_ids: list[int]) -> TokenizedDocument:
    """Build a document from a prompt and the target's answer, token by token."""
    return TokenizedDocument(ids=prompt_ids + answer_ids, answer=[False] * len(prompt_ids) + [True] * len(answer_ids))


def check_has_prompt(document: TokenizedDocument) -> TokenizedDocument:
    """Return the document if it has a prompt token; raise UserError otherwise.

    A conversation that is all answer is not a bad row to skip: the mask itself is broken.
    """
    require(
        not document.answer or not all(document.answer),
        "data: a conversation must hold a prompt too, got answer tokens only; check the chat "
        "template (its {% generation %} marks) or the recorded spans",
    )
    return document
