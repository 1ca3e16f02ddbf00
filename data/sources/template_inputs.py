"""Read what a row gives its chat template beside messages: a system prompt, tools, arguments, and tool calls.

Tables store these as objects or as JSON texts. Older data has `functions` and one `function_call` in place of `tools`
and `tool_calls`, or writes calls and their results as texts, `<tool_call>{"name": ...}</tool_call>` and
`<tool_response>...</tool_response>`.
"""

import json
import re
from contextlib import suppress
from itertools import pairwise
from typing import Any

from data.sources.rows import RowRejectedError, require_row

SYSTEM_COLUMNS = ("system", "system_prompt")
TEMPLATE_COLUMNS = ("template", "chat_template_kwargs")
CALL_TEXT = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
RESULT_TEXT = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


def read_known_inputs(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a row whose columns of these names may be about something else."""
    try:
        return read_template_inputs(raw)
    except RowRejectedError:
        return read_template_inputs({name: raw.get(name) for name in SYSTEM_COLUMNS})


def read_template_inputs(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `system`, `tools` and `template`, the arguments, that a row has; reject those of a wrong type."""
    system = next((raw[name] for name in SYSTEM_COLUMNS if isinstance(raw.get(name), str)), "")
    tools = parse_json(raw.get("tools"), "tools") or _read_functions(raw.get("functions"))
    template = parse_json(next((raw[name] for name in TEMPLATE_COLUMNS if raw.get(name)), None), "template arguments")
    require_row(
        tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)),
        "tools that are not a list of objects",
    )
    require_row(isinstance(template, dict | None), "a template that is not an object")
    inputs = {"system": system, "tools": tools, "template": template}
    return {name: value for name, value in inputs.items() if value}


def _read_functions(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of older data, which describes functions alone; None for a column of something else."""
    match parse_if_json(value):
        case [{"name": str()}, *_] as functions:
            return [{"type": "function", "function": function} for function in functions]
    return None


def add_system_prompt(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Return the messages, which begin with the system prompt, if there is one, unless they have their own."""
    has_own = any(message["role"] == "system" for message in messages)
    return messages if has_own or not system else [{"role": "system", "content": system}, *messages]


def parse_if_json(value: Any) -> Any:
    """Return a text that is JSON parsed, and any other value as it is."""
    with suppress(TypeError, ValueError, RecursionError):
        return json.loads(value)
    return value


def parse_json(value: Any, name: str) -> Any:
    """Return a value that may be stored as JSON text, parsed; raise RowRejectedError if that fails."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError) as error:
        raise RowRejectedError(f"{name} that are not JSON") from error


def parse_tool_calls(value: Any) -> list[dict[str, Any]]:
    """Return the tool calls in a value that holds one call, a list of calls or None."""
    value = parse_json(value, "tool_calls")
    single = [] if value is None else [value]
    calls = []
    for call in value if isinstance(value, list) else single:
        match call:
            case {"function": {"name": str()} as function}:
                calls.append({**call, "function": _parse_arguments(function)})
            case {"name": str()}:
                calls.append(_parse_arguments(call))
            case _:
                raise RowRejectedError("a tool call without a function's name")
    return calls


def _parse_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Return the function with its JSON arguments parsed: templates would quote a string."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    return {**function, "arguments": parse_json(arguments or "{}", "tool_calls")}


def read_function_call(value: Any) -> list[dict[str, Any]]:
    """Return the call of a message from before there were several; none for a placeholder."""
    with suppress(RowRejectedError):
        return [{"type": "function", "function": call} for call in parse_tool_calls(value or None)]
    return []


def read_call_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls and results that are written as texts in the form that templates render.

    A call is read only if a result follows: elsewhere the text may be about calls.
    """
    read = [dict(message) for message in messages]
    for message, result in pairwise(read):
        if message["role"] == "assistant" and result["role"] == "tool" and "tool_calls" not in message:
            with suppress(RowRejectedError):  # it stays a text
                if calls := parse_tool_calls([parse_json(text, "") for text in CALL_TEXT.findall(message["content"])]):
                    message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
                    message["content"] = CALL_TEXT.sub("", message["content"]).strip()
        if result["role"] == "tool" and (text := RESULT_TEXT.fullmatch(result["content"])):
            result["content"] = text[1]
    return read
