"""Parse generated answers into messages and tool calls, and compare tool calls.

Chat templates keep the reasoning of the latest turns and drop older reasoning. They can only do so
if a message holds it apart from its content, as a server's reasoning parser does.
"""

import json
import os
import re
from typing import Any

from data.chat.template import ChatTemplate, Message
from data.sources.row_formats import REASONING_KEYS
from data.sources.rows import RowRejectedError
from data.sources.template_inputs import parse_if_json

THOUGHT_START, THOUGHT_END = "<think>", "</think>"  # Qwen3, DeepSeek and most others; the prompt may hold the start
# Harmony (gpt-oss): one message per channel, with or without a recipient
HARMONY_CHANNEL = re.compile(
    r"<\|channel\|>(?P<name>\w+)(?P<header>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"(?P<text>.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)",
    re.DOTALL,
)
HARMONY_CALL = re.compile(r"to=functions\.([\w.-]+)[^{]*<\|message\|>(\{.*?\})(?=<\||$)", re.DOTALL)
TOOL_CALL_START = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\{")
# The last characters of a prompt locate its answer in a rendered conversation: a template may
# rewrite everything before them.
PROMPT_TAIL_CHARS = 8
_json_decoder = json.JSONDecoder()


def decode_answer(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of an answer without its end, with all tokens of channels and calls."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def message_from_text(text: str) -> Message:
    r"""Return the assistant's message that a template renders as it does in serving.

    A thought without an end was cut.

    >>> message_from_text("<think>\nEasy.\n</think>\n\n4")["content"]
    '4'
    """
    if channels := list(HARMONY_CHANNEL.finditer(text)):
        thoughts = [match["text"] for match in channels if match["name"] == "analysis"]
        visible = [m for m in channels if m["name"] != "analysis" and "to=" not in m["header"]]
        reasoning, content = "".join(thoughts), "".join(match["text"] for match in visible)
    else:
        is_open = text.lstrip().startswith(THOUGHT_START) and THOUGHT_END not in text
        reasoning, end, content = (text, "", "") if is_open else text.rpartition(THOUGHT_END)
        reasoning = reasoning.strip().removeprefix(THOUGHT_START).strip("\n")
        content = content.lstrip("\n") if end else content
    # Templates read different keys for the reasoning, and treat empty reasoning as absent.
    fields = dict.fromkeys(REASONING_KEYS, reasoning) if reasoning else {}
    return {"role": "assistant", "content": content, **fields}


def build_exact_message(chat: ChatTemplate, history: list[Message], text: str) -> Message:
    """Return the message that the template renders to `text`.

    Templates add or trim spaces, so the content is tried as it is and then stripped; a text that only mentions the end
    of a thought is tried whole. The first message is returned if none renders to `text`.
    """
    message = message_from_text(text)
    variants = (message, {**message, "content": message["content"].strip()}, {"role": "assistant", "content": text})
    return next((variant for variant in variants if renders_to(chat, history, variant, text)), message)


def renders_to(chat: ChatTemplate, history: list[Message], message: Message, text: str) -> bool:
    """Return whether the template writes the message as `text`, behind the prompt that asks for it."""
    try:
        prompt, rendered = chat.render(history, add_generation_prompt=True), chat.render([*history, message])
    except RowRejectedError:
        return False
    return text in rendered and rendered[: rendered.rfind(text)].endswith(prompt[-PROMPT_TAIL_CHARS:])


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
    calls = [(name, parse_if_json(arguments)) for name, arguments in HARMONY_CALL.findall(text)]
    start = text.find("{")
    while start >= 0:
        try:
            value, start = _json_decoder.raw_decode(text, start)
        except (ValueError, RecursionError):  # an answer may repeat a bracket to its limit
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
