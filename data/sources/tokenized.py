"""Build documents from token ids: with recorded answer spans, or from a prompt and its answer."""

from collections.abc import Iterable, Sequence

from data.sources.row_formats import RowRejectedError, TokenizedDocument, require_row
from models.errors import require


def require_embeddings(ids: Sequence[int], vocab_size: int | None) -> None:
    """Raise RowRejectedError for a token id that the target has no embedding for.

    A tokenizer may have tokens, such as added ones, that the model was not resized for. None for
    `vocab_size` checks nothing.
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
    return TokenizedDocument(
        ids=prompt_ids + answer_ids, answer=[False] * len(prompt_ids) + [True] * len(answer_ids)
    )


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
