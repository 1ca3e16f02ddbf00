"""Parse generated answers into messages and tool calls, and compare tool calls.

Chat templates keep the reasoning of the latest turns and drop older reasoning. They can only do so
if a message holds it apart from its content, as a server's reasoning parser does.
"""

import json
import os
import re
from typing import Any

from data.chat.template import Message
from data.sources.row_formats import REASONING_KEYS

THOUGHT_END = "</think>"  # Qwen3, DeepSeek and most others; the prompt may hold the start tag
# Harmony (gpt-oss): one message per channel, with or without a recipient
HARMONY_CHANNEL = re.compile(
    r"<\|channel\|>(?P<name>\w+)(?P<header>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"(?P<text>.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)",
    re.DOTALL,
)
HARMONY_CALL = re.compile(r"to=functions\.([\w.-]+)[^{]*<\|message\|>(\{.*?\})(?=<\||$)", re.DOTALL)
TOOL_CALL_START = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\{")
_json_decoder = json.JSONDecoder()


def message_from_text(text: str) -> Message:
    r"""Return the assistant's message that a template renders as it does in serving.

    >>> message_from_text("<think>\nEasy.\n</think>\n\n4")["content"]
    '4'
    """
    if channels := list(HARMONY_CHANNEL.finditer(text)):
        thoughts = [match["text"] for match in channels if match["name"] == "analysis"]
        visible = [m for m in channels if m["name"] != "analysis" and "to=" not in m["header"]]
        reasoning, content = "".join(thoughts), "".join(match["text"] for match in visible)
    else:
        reasoning, end, content = text.rpartition(THOUGHT_END)
        reasoning = reasoning.strip().removeprefix("<think>").strip("\n")
        content = content.lstrip("\n") if end else content
    # Templates read different keys for the reasoning, and treat empty reasoning as absent.
    fields = dict.fromkeys(REASONING_KEYS, reasoning) if reasoning else {}
    return {"role": "assistant", "content": content, **fields}


def merge_tool_call(message: Message, text: str) -> Message:
    """Return the data's message with the target's text and thoughts; the target repeated its tool call."""
    generated = message_from_text(text)
    content = TOOL_CALL_START.split(generated["content"])[0].strip()
    kept = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    return {**kept, **generated, "content": content}


def parse_tool_calls(text: str) -> list[tuple[str, Any]]:
    r"""Return the names and arguments of the tool calls in a text, in any known notation.

    >>> parse_tool_calls('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    [('add', {'a': 1})]
    """
    text = text.rpartition(THOUGHT_END)[2]
    calls = []
    for name, arguments in HARMONY_CALL.findall(text):
        try:
            calls.append((name, json.loads(arguments)))
        except ValueError:
            calls.append((name, arguments))
    start = text.find("{")
    while start >= 0:
        try:
            value, start = _json_decoder.raw_decode(text, start)
        except ValueError:
            start += 1
        else:
            if isinstance(value, dict) and "name" in value:
                calls.append((value["name"], value.get("arguments", value.get("parameters"))))
        start = text.find("{", start)
    return calls


def is_same_tool_call(text: str, prompt: str, rendered: str) -> bool:
    """Return whether a generated `text` makes the same tool call as the data's own message.

    `rendered` is the conversation up to and including that message, `prompt` the same conversation without it. Calls
    that can be parsed are compared by names and arguments, others by their text without white space.
    """
    prefix = os.path.commonprefix([prompt, rendered])  # noqa: RUF071  # compares characters
    expected = rendered[len(prefix) :]
    if expected_calls := parse_tool_calls(expected):
        return parse_tool_calls(text) == expected_calls
    return _strip_whitespace(text) == _strip_whitespace(expected)


def _strip_whitespace(text: str) -> str:
    return "".join(text.rpartition(THOUGHT_END)[2].split())
