"""What a target wrote, read as a message of the history: thoughts apart, calls of tools compared.

Chat templates keep thoughts of the latest turns and drop older ones, which they can only do where
the message holds them apart from its content, as a server's reasoning parser does.
"""

import json
import os
import re
from typing import Any

from data.chat.template import Message
from data.sources.row_formats import THOUGHTS

THOUGHT_END = "</think>"  # Qwen3, DeepSeek and most others; the begin may be the prompt's
CHANNEL = re.compile(  # Harmony (gpt-oss): a message a channel, each with a recipient or none
    r"<\|channel\|>(?P<name>\w+)(?P<header>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"(?P<text>.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)",
    re.DOTALL,
)
HARMONY_CALL = re.compile(r"to=functions\.([\w.-]+)[^{]*<\|message\|>(\{.*?\})(?=<\||$)", re.DOTALL)
CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\{")  # where one may begin
_json = json.JSONDecoder()


def message_of(said: str) -> Message:
    """An assistant's message that templates render as they would for serving.

    >>> message_of("<think>\\nEasy.\\n</think>\\n\\n4")["content"]
    '4'
    """
    if channels := list(CHANNEL.finditer(said)):
        return _from_channels(channels)
    thought, end, content = said.rpartition(THOUGHT_END)
    if not end:
        return {"role": "assistant", "content": said}
    thought = thought.strip().removeprefix("<think>").strip("\n")
    return _thought(thought, content.lstrip("\n"))


def _from_channels(channels: list[re.Match]) -> Message:
    thought = "".join(one["text"] for one in channels if one["name"] == "analysis")
    content = "".join(
        one["text"] for one in channels if one["name"] != "analysis" and "to=" not in one["header"]
    )
    return _thought(thought, content)


def _thought(thought: str, content: str) -> Message:
    """Under every name: templates read one of them, and none is the same as an empty one."""
    thoughts = dict.fromkeys(THOUGHTS, thought) if thought else {}
    return {"role": "assistant", "content": content, **thoughts}


def as_called(message: Message, said: str) -> Message:
    """The data's message with a call, which the target made too, with what else it said."""
    own = message_of(said)
    return {**message, **own, "content": CALL.split(own["content"])[0].strip()}


def calls(said: str) -> list[tuple[str, Any]]:
    """Calls of tools, whatever their notation: names and arguments.

    >>> calls('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
    [('add', {'a': 1})]
    """
    said = said.rpartition(THOUGHT_END)[2]
    found = []
    for name, arguments in HARMONY_CALL.findall(said):
        try:
            found.append((name, json.loads(arguments)))
        except ValueError:
            found.append((name, arguments))
    place = said.find("{")
    while place >= 0:
        try:
            value, place = _json.raw_decode(said, place)
        except ValueError:
            place += 1
        else:
            if isinstance(value, dict) and "name" in value:
                found.append((value["name"], value.get("arguments", value.get("parameters"))))
        place = said.find("{", place)
    return found


def same_call(said: str, prompt: str, rendered: str) -> bool:
    """Whether what was said is the call that a template renders behind a prompt.

    By names and arguments where the notation shows them, else by the text without its spaces.
    """
    known = os.path.commonprefix([prompt, rendered])  # noqa: RUF071  # characters are meant
    expected = rendered[len(known) :]
    if wanted := calls(expected):
        return calls(said) == wanted
    return _compact(said) == _compact(expected)


def _compact(text: str) -> str:
    return "".join(text.rpartition(THOUGHT_END)[2].split())
