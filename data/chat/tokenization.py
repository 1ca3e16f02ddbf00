"""Tokenize documents and mark exactly the tokens that the target would have generated."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat.answer_parsing import message_from_text
from data.chat.answer_spans import RewrittenError, find_all_answers, find_assistant_turns, find_last_answer
from data.chat.processes import map_in_order
from data.chat.template import CharSpan, ChatTemplate, Message
from data.config import DataConf, DemoConf, TurnSelection
from data.demo.prompts import training_prompts
from data.sources.row_formats import REASONING_KEYS
from data.sources.rows import (
    LABELS,
    Conversation,
    ParsedRow,
    PlainText,
    RowRejectedError,
    TokenizedDocument,
    check_has_prompt,
    document_from_pair,
    require_embeddings,
)
from data.sources.text_hashes import hash_first_question
from data.sources.training_rows import read_training_rows
from models.io.errors import UserError, require


def iter_documents(
    conf: DataConf,
    tokenizer: PreTrainedTokenizerBase,
    skipped: Counter[str],
    vocab_size: int | None = None,
    *,
    processes: int = 1,
    track: Callable[[Iterator[Any]], Iterable[Any]] = iter,
) -> Iterator[TokenizedDocument]:
    """Yield every document of the data; `skipped` counts the rows left out, by reason.

    `track` may show the progress of the rows. Raises UserError for a row with token ids from `vocab_size` on.
    """
    rows = read_training_rows(conf, skipped)
    tokenize = partial(documents_from_row, conf=conf, tokenizer=tokenizer, vocab_size=vocab_size)
    for documents, rejected in track(map_in_order(tokenize, rows, processes=processes)):
        skipped.update(rejected)
        yield from documents


def iter_demo_documents(
    conf: DemoConf,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    answer_prompts: Callable[[list[list[int]]], list[list[int]]] | None = None,
) -> Iterator[TokenizedDocument]:
    """Yield the demo's prompts, each with its answer.

    `answer_prompts` maps the token ids of the prompts to those of the answers. Without it, an
    answer is the text that follows the prompt in its file, cut to `conf.max_new_tokens`.
    """
    prompts = training_prompts(conf.num_prompts, seed=seed)
    prompt_ids: list[list[int]] = tokenizer([prompt.text for prompt in prompts])["input_ids"]
    if answer_prompts is None:
        continuations = tokenizer([prompt.continuation for prompt in prompts])["input_ids"]
        answers = [ids[: conf.max_new_tokens] for ids in continuations]
    else:
        answers = answer_prompts(prompt_ids)
    for prompt, ids, answer in zip(prompts, prompt_ids, answers, strict=True):
        yield replace(document_from_pair(ids, answer), category=prompt.category)


def documents_from_row(
    row: ParsedRow, conf: DataConf, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> tuple[list[TokenizedDocument], Counter[str]]:
    """Return the documents of a row, and the counts of rejected ones by reason.

    A conversation gives those that `conf.turns` asks for, any other row one. Raises UserError for unknown ids.
    """
    rejected: Counter[str] = Counter()
    match row:
        case TokenizedDocument():
            check_row_ids(row, vocab_size)
            return [row], rejected
        case PlainText(text=text):
            documents = [document_from_text(tokenizer, text)]
        case Conversation(messages=messages):
            arguments = {**conf.template, **row.template, "tools": row.tools}
            chat = ChatTemplate(tokenizer=tokenizer, arguments=arguments)
            documents, rejected = documents_from_conversation(chat, messages, conf.turns)
            row.first_question = hash_first_question(messages)
    labels = {name: getattr(row, name) for name in LABELS}
    usable = []
    for document in documents:
        try:
            require_embeddings(document.ids, vocab_size)
        except RowRejectedError as error:
            rejected[str(error)] += 1
        else:
            usable.append(replace(document, **labels))
    return usable, rejected


def check_row_ids(row: TokenizedDocument, vocab_size: int | None) -> None:
    """Raise UserError for ids of another tokenizer, which are wrong in every row, not in one."""
    try:
        require_embeddings(row.ids, vocab_size)
    except RowRejectedError as error:
        raise UserError(
            f"data: token ids must be below the target's vocabulary of {vocab_size} and not negative, got "
            f"{error.detail} at {row.location}; tokenize with the target's own tokenizer"
        ) from error


def documents_from_conversation(
    chat: ChatTemplate, messages: list[Message], turns: TurnSelection
) -> tuple[list[TokenizedDocument], Counter[str]]:
    """Return one document, or one for each assistant turn, and the counts of rejected ones."""
    if turns is TurnSelection.auto:
        with suppress(RowRejectedError, RewrittenError):
            return [document_from_messages(chat, messages)], Counter()
        documents, rejected = documents_from_conversation(chat, messages, TurnSelection.each)
        # A conversation without documents counts once, under its first reason.
        rejected = rejected if documents else Counter([*rejected][:1])
        return documents, rejected
    documents, rejected = [], Counter()
    ends = [turn + 1 for turn in find_assistant_turns(messages)]
    for end in ends if turns is TurnSelection.each else ends[-1:]:
        try:
            documents.append(document_from_messages(chat, messages[:end], last_only=turns is not TurnSelection.all))
        except RowRejectedError as error:
            rejected[str(error)] += 1
    return documents, rejected


def document_from_text(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenizedDocument:
    """Return the tokens of a plain text, all marked but the first, which has no context."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return TokenizedDocument(ids=ids, answer=[position > 0 for position in range(len(ids))])


def document_from_messages(
    chat: ChatTemplate, messages: list[Message], *, last_only: bool = False
) -> TokenizedDocument:
    """Return the tokens of a conversation, with each answer and its end-of-turn token marked.

    With `last_only` only the last answer is marked. Raises RowRejectedError if the prompt that the
    target read cannot be rendered, and RewrittenError if no single text holds all answers.
    """
    require(
        bool(chat.tokenizer.is_fast),
        "data.format: conversations must meet a tokenizer that reports character offsets, got "
        f"{type(chat.tokenizer).__name__}; give ids and answer flags (data.format=tokens)",
    )
    messages = [_fill_reasoning_keys(message) for message in messages]
    text, spans = find_last_answer(chat, messages) if last_only else find_all_answers(chat, messages)
    return check_has_prompt(_tokenize_text(chat.tokenizer, text, spans))


def _fill_reasoning_keys(message: Message) -> Message:
    """Return the message with its reasoning under every key, as templates drop it under one that they do not read."""
    # A text that was cut in its thought is reasoning alone.
    if message.get("finish_reason") == "length" and not (thought := message_from_text(message["content"]))["content"]:
        message = {**message, **thought}
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    return message if reasoning is None else {**dict.fromkeys(REASONING_KEYS, reasoning), **message}


def _tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[CharSpan]) -> TokenizedDocument:
    """Return the tokens of a text, with those of its spans marked."""
    # The text is split where answers begin, because serving tokenizes a prompt by itself.
    begins = [begin for begin, _ in spans] if _can_tokenize_parts(tokenizer) else []
    ids, offsets = [], []
    for left, right in pairwise([0, *begins, len(text)]):
        part = tokenizer(text[left:right], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids += part["input_ids"]
        offsets += [(left + start, left + end) for start, end in part["offset_mapping"]]
    return TokenizedDocument(ids=ids, answer=_mark_answer_tokens(offsets, text, spans))


@lru_cache(maxsize=4)
def _can_tokenize_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether parts of a text can be tokenized separately; some tokenizers add a space."""
    letter = tokenizer("x", add_special_tokens=False)["input_ids"]
    return tokenizer.decode(letter + letter) == "xx"


def _mark_answer_tokens(offsets: list[CharSpan], text: str, spans: list[CharSpan]) -> list[bool]:
    """Return a flag for each token that is True if the token lies in an answer.

    Its last token may extend past it by white space, as an end-of-turn token with a line break does.
    """
    answer = [False] * len(offsets)
    starts = [start for start, _ in offsets]
    for begin, end in spans:
        first_token, end_token = bisect_left(starts, begin), bisect_left(starts, end)
        while end_token > first_token and text[end : offsets[end_token - 1][1]].strip():
            end_token -= 1
        answer[first_token:end_token] = [True] * (end_token - first_token)
    return answer
