"""Rows of every known shape as conversations, texts or token ids.

A row that does not fit is left out and counted by its reason, never silently.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from data.config import Format
from data.sources.prompt_formats import shaped


@dataclass(kw_only=True)
class Labelled:
    """Hold the labels by which figures are grouped; empty where the row has none.

    `conversation` numbers the row of the data that a chat template renders: all documents of one
    conversation share it. None: a plain text, or token ids as they stand.
    """

    category: str = ""
    language: str = ""
    conversation: int | None = None


@dataclass(kw_only=True)
class Conversation(Labelled):
    """Messages as chat templates read them: a role, a content and what else the row carries."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template


@dataclass(kw_only=True)
class Text(Labelled):
    """Plain text without roles."""

    text: str


@dataclass(kw_only=True)
class Tokenised(Labelled):
    """Token ids, and which of them are answer tokens."""

    ids: list[int]
    answer: list[bool]


Row = Conversation | Text | Tokenised


class MisfitError(Exception):
    """One row cannot be used. `str(error)` is the reason under which it is counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail


COLUMNS = {
    Format.messages: "messages",
    Format.sharegpt: "conversations",
    Format.ultrachat: "data",
    Format.tokens: "ids",
    Format.text: "text",
}
LISTS = tuple(name for name in COLUMNS.values() if name != "text")  # columns that tell a shape
A_LIST = re.compile(r'\s*\[\s*[{"]')  # of messages or turns, as JSON
ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what datasets and templates call them
# keys of a message that templates read; what else data sets know of a speaker is left behind
SAID = ("role", "content", "name", "tool_calls", "tool_call_id", *THOUGHTS)
SYSTEM = ("system", "system_prompt")
ANSWERS = ("output", "response", "answer", "completion", "solution")  # beside a plain prompt


def shape(raw: dict[str, Any], format: Format = Format.auto, column: str | None = None) -> Row:
    """The row as it stands. The value tells its shape, whatever its column is called."""
    told = column or COLUMNS.get(format) or next((n for n in LISTS if _is_list(raw.get(n))), None)
    if told is None or format is Format.prompt:
        row = _prompt(raw, column)
    else:
        found, row = _value(raw, told)
        if format not in (Format.auto, found):
            raise MisfitError(f"column {told} has the shape {found.value}")
        if column is None and format is Format.auto and found is Format.text:
            raise MisfitError(f"column {told} holds a list that is not JSON")
    labels = {
        name: raw[name] for name in ("category", "language") if isinstance(raw.get(name), str)
    }
    return replace(row, **labels)


def _value(raw: dict[str, Any], column: str) -> tuple[Format, Row]:
    value: Any = _listed(raw.get(column))
    match value:
        case str(text):
            return Format.text, Text(text=text)
        case [{"role": _}, *_]:
            return Format.messages, _conversation([_message(each) for each in value], raw)
        case [{"from": _}, *_]:
            return Format.sharegpt, _conversation([_turn(each) for each in value], raw)
        case [str(), *_] if all(isinstance(each, str) for each in value):
            return Format.ultrachat, _conversation(_in_turn(list(value)), raw)
        case [int(), *_] if all(isinstance(each, int) for each in value):
            return Format.tokens, _tokenised(list(value), raw.get("answer"))
        case None:
            raise MisfitError(f"no column {column}", f"among {', '.join(raw)}")
    raise MisfitError(f"column {column} holds neither messages, turns, text nor ids")


def _prompt(raw: dict[str, Any], column: str | None) -> Row:
    """A plain prompt in the layout of a prompt file, with an answer where the row has one."""
    if column is not None:
        raw = {name: raw.get(name) for name in (*SYSTEM, *ANSWERS)} | {"prompt": raw.get(column)}
    try:
        prompt = shaped(raw, 0)
    except ValueError as error:
        raise MisfitError("a prompt that is not text", str(error)) from error
    if prompt is None:
        raise MisfitError("no messages, text or prompt", f"among {', '.join(raw)}")
    if "ids" in prompt:
        raise MisfitError("token ids in place of a prompt")
    answer = _answer(raw)
    if "messages" in prompt:
        messages = [_message(each) for each in prompt["messages"]]
        answered = messages[-1:] and messages[-1]["role"] == "assistant"
        return _conversation(messages if answered else messages + answer, raw)
    if "text" in prompt and raw.get("text") is not None:
        return Text(text=prompt["text"])
    asked = prompt["turns"] if "turns" in prompt else [prompt["text"]]
    if len(asked) == 1 and answer:
        return _conversation([*_in_turn(asked), *answer], raw)
    turns = [said for question in asked for said in (question, "")]  # answers to be drawn
    return _conversation(_in_turn(turns[:-1]), raw)


def _answer(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """What stands beside a prompt, as messages: a text, or messages as in TRL's data sets."""
    for name in ANSWERS:
        match _listed(raw.get(name)):
            case str(text) if text:
                return [{"role": "assistant", "content": text}]
            case [{"role": _}, *_] as messages:
                return [_message(each) for each in messages]
    return []


def _in_turn(said: list[str]) -> list[dict[str, Any]]:
    """The user begins."""
    return [
        {"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)
    ]


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise MisfitError("a message that is not an object")
    # tables fill absent keys with None, writers with []; templates would take them for present
    message = {key: raw[key] for key in SAID if raw.get(key) not in (None, [])}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise MisfitError("an unknown role", repr(role)[:80])
    message["role"] = ROLES[role]
    message["content"] = plain(message.get("content", ""))
    if calls := _tool_calls(message.pop("tool_calls", None)):
        message["tool_calls"] = calls
    return message


def plain(value: Any) -> str:
    """What a message says, in parts or not."""
    match value:
        case str():
            return value
        case [*parts] if all(isinstance(part, dict) for part in parts):
            texts = [part.get("text") for part in parts if part.get("type") == "text"]
            if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
                return "".join(texts)
    raise MisfitError("a message whose content is not text")


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """One call or several; None is none."""
    value = _parsed(value, "tool_calls")
    calls = []
    for call in value if isinstance(value, list) else [] if value is None else [value]:
        match call:
            case {"function": {"name": str()} as function}:
                calls.append({**call, "function": _with_values(function)})
            case {"name": str()}:
                calls.append(_with_values(call))
            case _:
                raise MisfitError("a tool call without a function's name")
    return calls


def _with_values(function: dict[str, Any]) -> dict[str, Any]:
    """With arguments as values: templates write a text of JSON as one more quoted text."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    return {**function, "arguments": _parsed(arguments or "{}", "tool_calls")}


def _turn(raw: Any) -> dict[str, Any]:
    """A turn of ShareGPT."""
    if not isinstance(raw, dict):
        raise MisfitError("a message that is not an object")
    return _message({"role": raw.get("from"), "content": raw.get("value")})


def _conversation(messages: list[dict[str, Any]], raw: dict[str, Any]) -> Conversation:
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise MisfitError("no user turn")
    if "assistant" in roles[: roles.index("user")]:
        raise MisfitError("an assistant turn before any user turn")
    system = next((raw[name] for name in SYSTEM if isinstance(raw.get(name), str)), "")
    if system and "system" not in roles:
        messages = [{"role": "system", "content": system}, *messages]
    tools = _parsed(raw.get("tools"), "tools")
    template = _parsed(raw.get("template", raw.get("chat_template_kwargs")), "template")
    tools = [] if tools is None else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise MisfitError("tools that are not a list of objects")
    if not isinstance(template, dict | None):
        raise MisfitError("a template that is not an object")
    return Conversation(messages=messages, tools=tools or None, template=template or {})


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and bool(A_LIST.match(value)))


def _listed(value: Any) -> Any:
    """A list that a table keeps as JSON; any other text as it is."""
    if isinstance(value, str) and A_LIST.match(value):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _parsed(value: Any, name: str) -> Any:
    """Tables keep such values as JSON: columns would give every row the keys of all."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError) as error:
        raise MisfitError(f"{name} that are not JSON") from error


def _tokenised(ids: list[int], answer: Any) -> Tokenised:
    if not isinstance(answer, list) or len(answer) != len(ids):
        raise MisfitError("ids without an answer flag for each")
    return Tokenised(ids=ids, answer=[bool(flag) for flag in answer])
