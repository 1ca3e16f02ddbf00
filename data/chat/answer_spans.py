"""Which part of a rendered conversation the target itself generated, turn by turn.

Each turn is compared with its prompt (data/chat/template.py); within what follows the prompt, a
template that marks its answers with {% generation %} is believed. In one text for all turns that
needs a template that never rewrites what it has said, which is checked for every turn.
"""

import re
from collections import Counter

from data.chat.template import Chat, Message, Span, markers
from data.sources.row_formats import MisfitError
from models.errors import UserError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RewrittenError(UserError):
    """The chat template changes an earlier turn once more of the conversation is known."""


def all_answers(chat: Chat, messages: list[Message]) -> tuple[str, list[Span]]:
    """The text up to the end of the last answer, and every answer in it.

    Raises RewrittenError where no single text holds all answers as they were generated.
    """
    text, spans = chat.text(messages), []
    for turn in turns(messages):
        known, answer = last_answer(chat, messages[: turn + 1])
        if not text.startswith(known):
            raise RewrittenError(
                "data.turns: the chat template must not rewrite earlier turns, got another text "
                f"for message {turn} once more of the conversation is known; set data.turns=each"
            )
        spans += answer
    return text[: spans[-1][1]] if spans else text, spans


def last_answer(chat: Chat, messages: list[Message]) -> tuple[str, list[Span]]:
    """The prompt that serving sends for the last turn, and the answer behind it."""
    marked = _marked(chat, messages) if GENERATION_TAG.search(chat.template) else None
    text, spans = marked or _compared(chat, messages)
    text = _turn(text, chat, messages)
    spans = [(begin, min(end, len(text))) for begin, end in spans if begin < len(text)]
    if spans and not _calls(messages[-1], "".join(text[begin:end] for begin, end in spans)):
        raise MisfitError("a tool call that the chat template does not write")
    return text, spans


def _turn(text: str, chat: Chat, messages: list[Message]) -> str:
    """Without the token that some templates write behind the last turn, whoever's it is."""
    end = str(chat.tokenizer.eos_token or "")
    turn = text.removesuffix(end).rstrip()
    if not turn.endswith(tuple(markers(chat.tokenizer))):
        return text
    going_on = chat.text(messages, prompt=True)
    return turn if going_on.startswith(turn) and not going_on.startswith(text) else text


def _calls(message: Message, answer: str) -> bool:
    """Whether the answer has all calls of the message: some templates write one, or none."""
    called = (call.get("function", call)["name"] for call in message.get("tool_calls", []))
    return all(answer.count(name) >= count for name, count in Counter(called).items())


def turns(messages: list[Message]) -> list[int]:
    """Which messages are the assistant's."""
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _compared(chat: Chat, messages: list[Message]) -> tuple[str, list[Span]]:
    found = chat.answer(messages[:-1], messages[-1])
    if not found:
        raise MisfitError("the chat template rewrites what it wrote before an answer")
    prompt, answer = found
    text = prompt + _to_end_of_turn(answer, chat)
    return text, [(len(prompt), len(text))]


def _marked(chat: Chat, messages: list[Message]) -> tuple[str, list[Span]] | None:
    """Marks from the end of the prompt to the end of the turn, wherever the author put the tag.

    None where the text does not begin with the prompt.
    """
    text, marks = chat.marked(messages)
    prompts = [chat.text(messages[:-1], prompt=True, **one) for one in chat.switches()]
    begin = max((len(prompt) for prompt in prompts if text.startswith(prompt)), default=None)
    if begin is None:
        return None
    spans = [
        (max(begin, left), left + len(_closed(text, left, right, chat)))
        for left, right in marks
        if right > begin
    ]
    return text[: spans[-1][1] if spans else begin], spans


def _closed(text: str, begin: int, end: int, chat: Chat) -> str:
    """A marked answer with its end-of-turn token, inside the mark or just behind it."""
    end_of_turn = str(chat.tokenizer.eos_token or "")
    if end_of_turn and text.startswith(end_of_turn, end):
        return text[begin:end] + end_of_turn
    inside = _to_end_of_turn(text[begin:end], chat)
    if inside.endswith(tuple(markers(chat.tokenizer))):
        return inside
    behind = [marker for marker in markers(chat.tokenizer) if text.startswith(marker, end)]
    return inside + max(behind, key=len, default="")


def _to_end_of_turn(answer: str, chat: Chat) -> str:
    """Without the line break that many templates write behind the end-of-turn token."""
    trimmed = answer.rstrip()
    return trimmed if trimmed.endswith(tuple(markers(chat.tokenizer))) else answer
