"""Token ids of a document, and exactly which of them the target would have produced."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from data.chat.answer_spans import RewrittenError, all_answers, last_answer, turns
from data.chat.mask_check import checked
from data.chat.template import Chat, Message, Span
from data.config import DataConf, Turns
from data.sources.row_formats import (
    THOUGHTS,
    Conversation,
    Labelled,
    MisfitError,
    Row,
    Text,
    Tokenised,
)
from data.sources.tokenized import refuse_answers_alone
from data.sources.training_rows import rows


def documents(
    conf: DataConf, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]
) -> Iterator[Tokenised]:
    """Every document of the data; `skipped` counts what was left out, by reason.

    Raises UserError where a category's masks are all wrong, before the last document is out.
    """
    return checked(unchecked(conf, tokenizer, skipped), skipped)


def unchecked(
    conf: DataConf, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]
) -> Iterator[Tokenised]:
    """The documents as they come, for those who look at masks."""
    for row in rows(conf, skipped):
        yield from from_row(row, conf, tokenizer, skipped)


def from_row(
    row: Row, conf: DataConf, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]
) -> Iterator[Tokenised]:
    """One document, or one for each assistant turn of a conversation."""
    match row:
        case Tokenised():
            yield row
        case Text(text=text):
            yield _labelled(from_text(tokenizer, text), row)
        case Conversation(messages=messages):
            chat = Chat(
                tokenizer=tokenizer, arguments={**conf.template, **row.template, "tools": row.tools}
            )
            for document in from_conversation(chat, messages, conf.turns, skipped):
                yield _labelled(document, row)


def from_conversation(
    chat: Chat, messages: list[Message], wanted: Turns, skipped: Counter[str]
) -> Iterator[Tokenised]:
    """One document, or one for each assistant turn."""
    ends = [turn + 1 for turn in turns(messages)]
    left_out: Counter[str] = Counter()
    automatic = wanted is Turns.auto
    if automatic:
        wanted = Turns.each
        with suppress(MisfitError, RewrittenError):
            yield from_messages(chat, messages)
            return
    for end in ends if wanted is Turns.each else ends[-1:]:
        try:
            yield from_messages(chat, messages[:end], last_only=wanted is not Turns.all)
        except MisfitError as reason:
            left_out[str(reason)] += 1
    if automatic and left_out.total() == len(ends):  # the conversation as a whole, counted once
        left_out = Counter([*left_out][:1])
    skipped.update(left_out)


def _labelled(document: Tokenised, row: Labelled) -> Tokenised:
    return replace(
        document, category=row.category, language=row.language, conversation=row.conversation
    )


def from_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokenised:
    """Plain text: all but the first token, which nothing comes before."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return Tokenised(ids=ids, answer=[position > 0 for position in range(len(ids))])


def from_messages(chat: Chat, messages: list[Message], *, last_only: bool = False) -> Tokenised:
    """One document; its answers are the assistant turns, each with its end-of-turn token.

    Raises MisfitError where the prompt that the target saw cannot be had.
    """
    messages = [_with_thought(message) for message in messages]
    text, spans = last_answer(chat, messages) if last_only else all_answers(chat, messages)
    return refuse_answers_alone(_tokenised(chat.tokenizer, text, spans))


def _with_thought(message: Message) -> Message:
    """A thought under every name that templates read; they drop one under another in silence."""
    thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
    return message if thought is None else {**dict.fromkeys(THOUGHTS, thought), **message}


def _tokenised(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span]) -> Tokenised:
    """The text's tokens. Serving tokenises a prompt alone, so no token lies across its end."""
    begins = [begin for begin, _ in spans] if _separable(tokenizer) else []
    ids, places = [], []
    for left, right in pairwise([0, *begins, len(text)]):
        part = tokenizer(
            text[left:right], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids += part["input_ids"]
        places += [(left + start, left + end) for start, end in part["offset_mapping"]]
    return Tokenised(ids=ids, answer=_within(places, text, spans))


@lru_cache(maxsize=4)
def _separable(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether parts of a text can be tokenised one by one: some put a space before each."""
    letter = tokenizer("x", add_special_tokens=False)["input_ids"]
    return tokenizer.decode(letter + letter) == "xx"


def _within(places: list[Span], text: str, spans: list[Span]) -> list[bool]:
    """Which tokens lie in an answer. An end-of-turn token may take the line break along."""
    answer = [False] * len(places)
    starts = [start for start, _ in places]
    for begin, finish in spans:
        first, behind = bisect_left(starts, begin), bisect_left(starts, finish)
        while behind > first and text[finish : places[behind - 1][1]].strip():
            behind -= 1
        answer[first:behind] = [True] * (behind - first)
    return answer
