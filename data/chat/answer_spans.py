"""Find the parts of a rendered conversation that the target generated, turn by turn (docs/masks.md)."""

import re
from collections import Counter

from data.chat.template import PROBE_TEXT, CharSpan, ChatTemplate, Message, find_added_tokens, find_special_tokens
from data.sources.row_formats import REASONING_KEYS
from data.sources.rows import RowRejectedError, require_row
from models.io.errors import UserError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RewrittenError(UserError):
    """The error of a chat template that renders an earlier turn differently in a longer text."""


def find_all_answers(chat: ChatTemplate, messages: list[Message]) -> tuple[str, list[CharSpan]]:
    """Return the text up to the end of the last answer, and the spans of all answers in it.

    Without an answer the text is not cut. Raises RewrittenError if the template changes a turn once others follow.
    """
    text, spans = chat.render(messages), []
    for turn in find_assistant_turns(messages):
        prefix, answer_spans = find_last_answer(chat, messages[: turn + 1])
        if not text.startswith(prefix):
            raise RewrittenError(
                "data.turns: the chat template must not rewrite earlier turns, but the text up to "
                f"message {turn} changes once later messages follow it; set data.turns=each"
            )
        spans += answer_spans
    end = spans[-1][1] if spans else len(text)
    return text[:end], spans


def find_last_answer(chat: ChatTemplate, messages: list[Message]) -> tuple[str, list[CharSpan]]:
    """Return serving's prompt followed by the last answer, and the answer's spans in that text.

    Raises RowRejectedError if no text shows both, a tool call is lacking, or only an end-of-turn token is the answer.
    """
    marked = _find_by_marks(chat, messages) if GENERATION_TAG.search(chat.source) else None
    text, spans = marked or _find_by_prompt(chat, messages)
    text = _strip_trailing_eos(text, chat, messages)
    if messages[-1].get("finish_reason") == "length":
        text = _strip_unwritten_end(text, chat, messages)
    spans = [(begin, min(end, len(text))) for begin, end in spans if begin < len(text)]
    answer_text = "".join(text[begin:end] for begin, end in spans)
    calls = [call.get("function", call)["name"] for call in messages[-1].get("tool_calls", [])]
    require_row(  # Some templates drop calls.
        not spans or all(answer_text.count(name) >= count for name, count in Counter(calls).items()),
        "a tool call that the chat template does not write",
    )
    require_row(  # Some templates drop reasoning, and Qwen3's takes an empty thought from the text.
        not spans or bool(_strip_end_of_turn(answer_text, chat).strip()),
        "an answer of which the chat template writes nothing",
    )
    return text, spans


def _strip_trailing_eos(text: str, chat: ChatTemplate, messages: list[Message]) -> str:
    """Return the text without the EOS token that some templates write after the last turn and its own end."""
    eos = str(chat.tokenizer.eos_token or "")
    stripped = text.removesuffix(eos).rstrip()
    if not stripped.endswith(tuple(find_added_tokens(chat.tokenizer))):
        return text
    continued = chat.render(messages, add_generation_prompt=True)
    # An EOS token that is missing once the conversation goes on belongs to no turn.
    return stripped if continued.startswith(stripped) and not continued.startswith(text) else text


def _strip_unwritten_end(text: str, chat: ChatTemplate, messages: list[Message]) -> str:
    """Return the text up to the end of an answer that was cut, without what the template alone writes behind it."""
    *history, message = messages
    if message.get("tool_calls"):
        return _strip_end_of_turn(text, chat)
    keys = ["content"] if message["content"].strip() else REASONING_KEYS
    written = next((message[key] for key in keys if message.get(key)), "")
    require_row(bool(written), "an answer that was cut before its first word")
    probe = chat.render([*history, {**message, **dict.fromkeys(keys, PROBE_TEXT)}])
    _, is_written, end = probe.rpartition(PROBE_TEXT)
    for length in range(len(end), -1, -1) if is_written else ():  # `text` may lack the last line break of `end`
        stripped = text.removesuffix(end[:length])
        if stripped.endswith((written, written.strip())):
            return stripped
    raise RowRejectedError("an answer that was cut where the chat template rewrites it")


def find_assistant_turns(messages: list[Message]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _find_by_prompt(chat: ChatTemplate, messages: list[Message]) -> tuple[str, list[CharSpan]]:
    prompt, answer = chat.split_answer(messages[:-1], messages[-1])
    text = prompt + _trim_after_end_of_turn(answer, chat)
    return text, [(len(prompt), len(text))]


def _find_by_marks(chat: ChatTemplate, messages: list[Message]) -> tuple[str, list[CharSpan]] | None:
    """Return the text and the marked spans after the prompt, each to the end of its turn.

    Return None if the text does not begin with the prompt. Marks are clipped, because authors
    put the tags before or after headers and end-of-turn tokens.
    """
    text, marks = chat.render_with_marks(messages)
    begin = max((len(p) for p, _ in chat.render_prompts(messages[:-1]) if text.startswith(p)), default=None)
    if begin is None:
        return None
    spans = [
        (max(begin, left), left + len(_extend_to_end_of_turn(text, left, right, chat)))
        for left, right in marks
        if right > begin
    ]
    end = spans[-1][1] if spans else begin
    return text[:end], spans


def _extend_to_end_of_turn(text: str, begin: int, end: int, chat: ChatTemplate) -> str:
    """Return a marked answer with its end-of-turn token, which may lie in the mark or after it."""
    eos = str(chat.tokenizer.eos_token or "")
    if eos and text.startswith(eos, end):
        return text[begin:end] + eos
    answer = _trim_after_end_of_turn(text[begin:end], chat)
    added_tokens = tuple(find_added_tokens(chat.tokenizer))
    if answer.endswith(find_special_tokens(chat.tokenizer)):  # `</tool_call>` is an added token, but of the content
        return answer
    return text[begin:end] + max((t for t in added_tokens if text.startswith(t, end)), key=len, default="")


def _strip_end_of_turn(answer: str, chat: ChatTemplate) -> str:
    """Return the answer without the token that ends it."""
    ends = (token for token in find_added_tokens(chat.tokenizer) if answer.endswith(token))
    return answer.removesuffix(max(ends, key=len, default=""))


def _trim_after_end_of_turn(answer: str, chat: ChatTemplate) -> str:
    """Return the answer without the line break that many templates write after its last token."""
    trimmed = answer.rstrip()
    return trimmed if trimmed.endswith(tuple(find_added_tokens(chat.tokenizer))) else answer
