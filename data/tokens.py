"""Token ids of a document, and exactly which of them the target would have produced.

A chat template that marks its answers with {% generation %} is believed. For any other, the
prompt of each assistant turn is rendered as serving would render it (`add_generation_prompt`): what
the full text has beyond it, up to the end-of-turn token, is the answer. That needs a template that
never rewrites what it has already said, which is checked for every turn.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from data.config import DataConf, Turns
from data.conversations import Conversation, Text, Tokenised, rows
from models.errors import UserError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = list[dict[str, Any]]
Span = tuple[int, int]  # characters of the rendered text


def documents(
    conf: DataConf, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]
) -> Iterator[Tokenised]:
    """Every document of the data, tokenised; `skipped` counts what was left out, by reason."""
    for row in rows(conf, skipped):
        match row:
            case Tokenised():
                yield row
            case Text(text=text):
                yield from_text(tokenizer, text)
            case Conversation(messages=messages):
                try:
                    yield from from_turns(tokenizer, messages, conf.turns, conf.template)
                except TemplateError as error:  # "roles must alternate" and the like
                    skipped[f"refused by the chat template: {error}"] += 1


def from_pair(prompt_ids: list[int], answer_ids: list[int]) -> Tokenised:
    """A prompt and what the target answered, token by token."""
    return Tokenised(
        ids=prompt_ids + answer_ids, answer=[False] * len(prompt_ids) + [True] * len(answer_ids)
    )


def from_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokenised:
    """Plain text: all but the first token, which nothing comes before."""
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    return Tokenised(ids=ids, answer=[position > 0 for position in range(len(ids))])


def from_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, turns: Turns, arguments: dict[str, Any]
) -> list[Tokenised]:
    """A conversation as one document, or as one for each assistant turn."""
    if turns is not Turns.each:
        last_only = turns is Turns.last
        return [from_conversation(tokenizer, messages, arguments=arguments, last_only=last_only)]
    ends = [turn + 1 for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        from_conversation(tokenizer, messages[:end], arguments=arguments, last_only=True)
        for end in ends
    ]


def from_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    arguments: dict[str, Any] | None = None,
    last_only: bool = False,
) -> Tokenised:
    """One document; its answers are the assistant turns, each with its end-of-turn token."""
    template = _template(tokenizer)
    if GENERATION_TAG.search(template):
        text, spans = _marked(tokenizer, template, messages, arguments or {})
        spans = spans[-1:] if last_only else spans
    else:
        text, spans = _compared(tokenizer, messages, arguments or {}, last_only)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Tokenised(
        ids=list(encoded["input_ids"]), answer=_within(encoded["offset_mapping"], spans)
    )


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            "data.format: conversations must meet a target with a chat template, got a tokenizer "
            "without one; use plain text (data.format=text) or ids (data.format=tokens)"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            "data.format: conversations must meet a tokenizer that reports character offsets, got "
            f"{type(tokenizer).__name__}; give ids and answer flags (data.format=tokens)"
        )
    return template


def _marked(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages, arguments: dict[str, Any]
) -> tuple[str, list[Span]]:
    """The text, and what the template marks. An end-of-turn token just behind a mark belongs to it.

    The tokenizer's own `return_assistant_tokens_mask` maps the same marks to tokens, but runs to
    the end of the text where a mark ends in a space that belongs to no token.
    """
    rendered: Any = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **arguments},  # pyright: ignore[reportArgumentType]
    )
    (text,), (marks,) = rendered
    end_of_turn = str(tokenizer.eos_token or "")
    spans = [
        (begin, end + len(end_of_turn) * text.startswith(end_of_turn, end)) for begin, end in marks
    ]
    return text, spans


def _compared(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    arguments: dict[str, Any],
    last_only: bool,
) -> tuple[str, list[Span]]:
    """The text, and where each assistant turn goes beyond the prompt that serving would send."""

    def render(until: int, *, prompt: bool = False) -> str:
        rendered = tokenizer.apply_chat_template(
            messages[:until], tokenize=False, add_generation_prompt=prompt, **arguments
        )
        return str(rendered)

    text = render(len(messages))
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for turn in turns[-1:] if last_only else turns:
        prompt, answered = render(turn, prompt=True), render(turn + 1)
        if not (answered.startswith(prompt) and text.startswith(answered)):
            raise _rewritten(turn, last_only)
        answer = answered[len(prompt) :]
        headed = not answer.lstrip().startswith(messages[turn]["content"].strip())
        if headed and prompt == render(turn):
            raise UserError(
                "data.format: the chat template must know add_generation_prompt, got one that "
                "writes the header of the answer with the answer; mark its answers with "
                "{% generation %}"
            )
        spans.append((len(prompt), len(prompt) + len(_to_end_of_turn(answer, tokenizer))))
    return text, spans


def _to_end_of_turn(answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Without the line break that many templates write behind the end-of-turn token."""
    added: Any = tokenizer.get_added_vocab  # special or not, as the tokenizer's author chose
    trimmed = answer.rstrip()
    return trimmed if trimmed.endswith(tuple(added())) else answer


def _rewritten(turn: int, last_only: bool) -> UserError:
    remedies = "mark its answers with {% generation %} or try data.template={enable_thinking:false}"
    if not last_only:
        remedies = f"set data.turns=each, or {remedies}"
    return UserError(
        "data.turns: the chat template must not rewrite earlier turns, got another text for "
        f"message {turn} once more of the conversation is known; {remedies}"
    )


def _within(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Which tokens lie in a span. A token across its beginning is the prompt's."""
    return [
        any(begin <= start and begin < end <= finish for begin, finish in spans)
        for start, end in offsets
    ]
