"""Parse rows of every known format into conversations, texts or token ids.

A row that cannot be parsed raises RowRejectedError with the reason under which callers count it.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from data.config import RowFormat
from data.sources.prompt_formats import is_message, messages_from_texts, parse_message_texts, prompt_from_row
from data.sources.rows import (
    Conversation,
    ParsedRow,
    PlainText,
    RowRejectedError,
    TokenizedDocument,
    require_row,
    require_unicode,
)
from data.sources.template_inputs import (
    SYSTEM_COLUMNS,
    add_system_prompt,
    parse_if_json,
    parse_tool_calls,
    read_call_texts,
    read_function_call,
    read_template_inputs,
)

FORMAT_COLUMNS = {
    RowFormat.messages: "messages",
    RowFormat.sharegpt: "conversations",
    RowFormat.ultrachat: "data",
    RowFormat.tokens: "ids",
    RowFormat.text: "text",
}
# Columns whose lists identify the format of a row.
LIST_COLUMNS = tuple(name for name in FORMAT_COLUMNS.values() if name != "text")
JSON_LIST = re.compile(r'\s*\[\s*[{"]')  # the start of a list of messages or turns, as JSON
ROLE_NAMES = {  # the role of a message by its name in the data
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # datasets and templates use all
# Templates read these keys of a message; other keys of a dataset's messages are dropped.
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING_KEYS)
NOT_AN_OBJECT = "a message that is not an object"
NO_ANSWER = "no assistant turn"
QUESTION_COLUMNS = ("question", "problem", "instruction", "prompt")
ANSWER_COLUMNS = ("output", "response", "answer", "completion", "solution")  # beside a plain prompt


def parse_row(raw: dict[str, Any], format: RowFormat = RowFormat.auto, column: str | None = None) -> ParsedRow:
    """Parse a row by the value of its column; raise RowRejectedError if it cannot be used.

    The value determines the format, not the column's name. A `format` other than auto is the only one accepted.
    """
    column_name = (
        column
        or FORMAT_COLUMNS.get(format)
        or next((name for name in LIST_COLUMNS if _is_conversation(raw, name)), None)
    )
    if column_name is None or format is RowFormat.prompt:
        row = _parse_prompt_row(raw, column)
    else:
        detected, row = _parse_column(raw, column_name, format)
        require_row(format in (RowFormat.auto, detected), f"column {column_name} has the format {detected.value}")
        require_row(
            column is not None or format is not RowFormat.auto or detected is not RowFormat.text,
            f"column {column_name} holds a list that is not JSON",
        )
    names = ("category", "language")
    row = replace(row, **{name: raw[name] for name in names if isinstance(raw.get(name), str)})
    if not isinstance(row, TokenizedDocument):
        require_unicode(vars(row))
    return row


def truncate_to_last_answer(row: ParsedRow) -> ParsedRow:
    """Cut a conversation after its last answer, because later messages hold nothing to train on.

    Other rows are returned as they are. Raises RowRejectedError for a conversation without an answer, or an empty one.
    """
    if not isinstance(row, Conversation):
        return row
    answer_ends = [end for end, m in enumerate(row.messages, 1) if m["role"] == "assistant"]
    require_row(bool(answer_ends), NO_ANSWER)
    messages = row.messages[: answer_ends[-1]]
    require_row(all(map(has_content, messages)), "an empty turn")
    return replace(row, messages=messages)


def _is_conversation(raw: dict[str, Any], column: str) -> bool:
    """Return whether a column has a list that identifies the row's format: not texts that stand beside a question."""
    value = raw.get(column)
    is_list = bool(value) and (isinstance(value, list) or _is_json_list(value))
    if not is_list or column not in ("data", "ids"):
        return is_list
    texts = all(isinstance(item, str) for item in _parse_json_list(value))
    return not (texts and any(isinstance(raw.get(name), str) for name in QUESTION_COLUMNS))


def _parse_column(raw: dict[str, Any], column: str, format: RowFormat) -> tuple[RowFormat, ParsedRow]:
    """Detect the format of a column's value, and parse the row in it."""
    stored = raw.get(column)
    value: Any = stored if format is RowFormat.text else _parse_json_list(stored)
    if column == "text" and isinstance(stored, str) and not (isinstance(value, list) and is_message(value[0])):
        value = stored  # a text, though it may be a list as JSON
    match value:
        case str(text):
            return RowFormat.text, PlainText(text=text)
        case [{"role": _}, *_]:
            return RowFormat.messages, _build_conversation(_add_answer(map(parse_message, value), raw), raw)
        case [{"from": _}, *_]:
            require_row(all(isinstance(turn, dict) for turn in value), NOT_AN_OBJECT)
            return RowFormat.sharegpt, _build_conversation(
                [parse_message({"role": turn.get("from"), "content": turn.get("value")}) for turn in value], raw
            )
        case [str(), *_] if all(isinstance(text, str) for text in value):
            return RowFormat.ultrachat, _build_conversation(messages_from_texts(list(value)), raw)
        case [int(), *_] if all(isinstance(token_id, int) for token_id in value):
            flags: Any = raw.get("answer")
            require_row(isinstance(flags, list) and len(flags) == len(value), "ids without an answer flag for each")
            return RowFormat.tokens, TokenizedDocument(ids=list(value), answer=list(map(bool, flags)))
        case None:
            raise RowRejectedError(f"no column {column}", f"the row has {', '.join(raw)}")
    raise RowRejectedError(f"column {column} holds no messages, turns, text or token ids")


def _parse_prompt_row(raw: dict[str, Any], column: str | None) -> ParsedRow:
    """Parse a row in the format of a prompt file, with its answer if the row has one."""
    if column is not None:
        raw = {name: raw.get(name) for name in (*SYSTEM_COLUMNS, *ANSWER_COLUMNS)} | {"prompt": raw.get(column)}
    try:
        prompt = prompt_from_row(raw, 0)
    except ValueError as error:
        raise RowRejectedError("a prompt that is not text", str(error)) from error
    if prompt is None:
        raise RowRejectedError("no messages, text or prompt", f"the row has {', '.join(raw)}")
    require_row("ids" not in prompt, "token ids in place of a prompt")
    if "messages" in prompt:
        return _build_conversation(_add_answer(map(parse_message, prompt["messages"]), raw), raw)
    if "text" in prompt:
        return PlainText(text=prompt["text"])
    questions = prompt["turns"]
    if len(questions) == 1:
        return _build_conversation(_add_answer(messages_from_texts(questions), raw), raw)
    # Empty assistant turns stand between the questions until answers are generated.
    texts = [text for question in questions for text in (question, "")][:-1]
    return _build_conversation(messages_from_texts(texts), raw)


def _add_answer(messages: Iterable[dict[str, Any]], raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages, and behind a question the answer that the row has beside them."""
    listed = list(messages)
    has_answer = listed[-1:] and listed[-1]["role"] == "assistant"
    return listed if has_answer else [*listed, *_parse_answer(raw)]


def _parse_answer(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a prompt row's answer, a text or messages as in TRL's datasets; none without one."""
    for name in ANSWER_COLUMNS:
        match _parse_json_list(raw.get(name)), raw.get(name):
            case [{"role": _}, *_] as messages, _:
                return [parse_message(message) for message in messages]
            case _, str(text) if text:
                return [{"role": "assistant", "content": text}]
    return []


def parse_prompt_messages(raw_messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages up to the last question; raise RowRejectedError for messages that cannot be asked."""
    messages = read_call_texts([parse_message(message) for message in raw_messages])
    while messages[1:] and (messages[-1]["role"] == "assistant" or not has_content(messages[-1])):
        messages.pop()
    require_row(any(message["role"] == "user" for message in messages), "no user turn")
    require_row(all(map(has_content, messages)), "an empty turn")
    return messages


def has_content(message: dict[str, Any]) -> bool:
    """Return False for an empty turn of the user or the assistant; an empty answer may be yet to be generated."""
    return message["role"] not in ("user", "assistant") or bool(
        message["content"].strip() or any(message.get(key) for key in ("tool_calls", *REASONING_KEYS))
    )


def parse_message(raw: Any) -> dict[str, Any]:
    """Return a message with the roles and keys that chat templates know."""
    require_row(isinstance(raw, dict), NOT_AN_OBJECT)
    # Tables fill absent keys with None and some writers with []; templates test only for the key.
    message = {key: raw[key] for key in MESSAGE_KEYS if raw.get(key) not in (None, [])}
    role = message.get("role")
    if role == "function_call":  # a turn of its own, whose text is the call
        calls = parse_tool_calls(message.get("content"))
        calls = [call if "function" in call else {"type": "function", "function": call} for call in calls]
        role, message = "assistant", {"content": "", "tool_calls": calls}
    if not isinstance(role, str) or role not in ROLE_NAMES:
        raise RowRejectedError("an unknown role", repr(role)[:80])
    message["role"] = ROLE_NAMES[role]
    message["content"] = text_from_content(message.get("content", ""))
    if calls := parse_tool_calls(message.pop("tool_calls", None)) or read_function_call(raw.get("function_call")):
        message["tool_calls"] = calls
    return message


def text_from_content(value: Any) -> str:
    """Return a message's content as one text, joining content that comes in parts."""
    match value:
        case str():
            return value
        case [*parts] if all(isinstance(part, dict) for part in parts):
            texts = [part.get("text") for part in parts if part.get("type") == "text"]
            if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
                return "".join(texts)
    raise RowRejectedError("a message whose content is not text")


def _build_conversation(messages: list[dict[str, Any]], raw: dict[str, Any]) -> Conversation:
    roles = [message["role"] for message in messages]
    require_row("user" in roles, "no user turn")
    # Nobody asked for an answer before the first question, and templates reject it.
    first = roles.index("user")
    asked = [m for m in messages[:first] if m["role"] == "system"] + messages[first:]
    if asked[-1]["role"] == "assistant" and raw.get("finish_reason") == "length":
        asked[-1]["finish_reason"] = "length"
    inputs = read_template_inputs(raw)
    return Conversation(
        messages=add_system_prompt(read_call_texts(asked), inputs.pop("system", "")),
        num_left_out=len(messages) - len(asked),
        **inputs,
    )


def _is_json_list(value: Any) -> bool:
    return isinstance(value, str) and bool(JSON_LIST.match(value))


def _parse_json_list(value: Any) -> Any:
    """Parse a list that a table stores as JSON, in one text or message by message; return other values as they are."""
    return parse_message_texts(parse_if_json(value) if _is_json_list(value) else value)
