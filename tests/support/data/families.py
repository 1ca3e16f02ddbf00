"""Seven chat families: templates, small tokenizers, and the exact text that each target generates."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.support.models.tiny import byte_tokenizer

TEMPLATES = Path(__file__).parents[2] / "templates"
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Hello there, how warm is it in Oslo?"}
ANSWER = {"role": "assistant", "content": "It is 7 degrees.\n\nThat is cold."}
THANKS = {"role": "user", "content": "Say <end>\n\nit is. "}
AGAIN = {"role": "assistant", "content": "It is cold, caf\u00e9 or not: \U0001f976"}
CALL = {"name": "weather", "arguments": {"city": "Troms\u00f8", "days": 1}}
CALLS = [{"id": "abcdefghi", "type": "function", "function": CALL}]
CALLING = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "7"}
FUNCTION = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
THOUGHT, SECOND = "The user asks me.\nI look.", "Now I know."

SINGLE = [SYSTEM, QUESTION, ANSWER]
MULTI = [*SINGLE, THANKS, AGAIN]
TOOL = [QUESTION, CALLING, RESULT, ANSWER]
TOOL_MULTI = [*TOOL, THANKS, AGAIN]
TWICE = [
    QUESTION,
    {**CALLING, "tool_calls": [*CALLS, {**CALLS[0], "id": "abcdefghj"}]},
    RESULT,
    {**RESULT, "tool_call_id": "abcdefghj"},
    ANSWER,
]


def thinking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a thought before each answer."""
    thoughts = iter([THOUGHT, SECOND, THOUGHT])
    return [
        {**message, "reasoning_content": next(thoughts)} if message["role"] == "assistant" else message
        for message in messages
    ]


@dataclass(kw_only=True)
class ConversationCase:
    """A conversation, and the exact text that the target generated in each of its turns."""

    messages: list[dict[str, Any]]
    says: list[str]
    rewritten: bool = False  # whether the template changes earlier turns once later ones are known
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Family:
    """A published chat format: its special tokens, its template and conversations in it."""

    markers: list[str]
    bos: str
    eos: str
    cases: dict[str, ConversationCase]
    replaced: tuple[str, str] = ("", "")  # in the template of the family that it is like
    like: str | None = None

    def tokenizer(self, name: str) -> PreTrainedTokenizerFast:
        template = (TEMPLATES / f"{self.like or name}.jinja").read_text().replace(*self.replaced)
        return byte_tokenizer(self.markers, template=template, bos_token=self.bos, eos_token=self.eos)


REPLY, REPLY_2 = ANSWER["content"], AGAIN["content"]
ARGUMENTS = '{"city": "Troms\u00f8", "days": 1}'
OFF = {"enable_thinking": False}

QWEN_MARKERS = (
    "<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
).split()
QWEN_TOOL_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
QWEN_CALL, QWEN_CALLS = f"{QWEN_TOOL_CALL}<|im_end|>", f"{QWEN_TOOL_CALL}\n{QWEN_TOOL_CALL}<|im_end|>"
QWEN = [f"{REPLY}<|im_end|>", f"{REPLY_2}<|im_end|>"]
QWEN_THOUGHTS = [f"<think>\n{thought}\n</think>\n\n" for thought in (THOUGHT, SECOND, THOUGHT)]
QWEN_OPEN_THOUGHTS = [thought.removeprefix("<think>\n") for thought in QWEN_THOUGHTS]
QWEN_SWITCH = """{%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}"""
LLAMA_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}<|eot_id|>'
MISTRAL_CALL = f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]</s>'
TEKKEN_CALL = MISTRAL_CALL.replace("] [", "][")
TEKKEN_CALLS = (
    TEKKEN_CALL.removesuffix("]</s>") + ", " + TEKKEN_CALL.removeprefix("[TOOL_CALLS][").replace("ghi", "ghj")
)
FINAL = "<|channel|>final<|message|>"
HARMONY = [f"{FINAL}{REPLY}<|return|>", f"{FINAL}{REPLY_2}<|return|>"]
HARMONY_THOUGHTS = [
    f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" for thought in (THOUGHT, SECOND, THOUGHT)
]
HARMONY_CALL = f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"


def join_pairwise(first: list[str], second: list[str]) -> list[str]:
    return [left + right for left, right in zip(first, second, strict=False)]


FAMILIES = {
    "qwen3": Family(
        markers=QWEN_MARKERS,
        bos="<|endoftext|>",
        eos="<|im_end|>",
        cases={
            "single": ConversationCase(messages=SINGLE, says=QWEN[:1]),
            "multi": ConversationCase(messages=MULTI, says=QWEN, rewritten=True),
            "tools": ConversationCase(messages=TOOL, says=[QWEN_CALL, QWEN[0]], tools=TOOLS, rewritten=True),
            "two calls": ConversationCase(messages=TWICE, says=[QWEN_CALLS, QWEN[0]], tools=TOOLS, rewritten=True),
            "single, off": ConversationCase(messages=SINGLE, says=QWEN[:1], template=OFF),
            "multi, off": ConversationCase(messages=MULTI, says=QWEN, template=OFF, rewritten=True),
            "empty thought": ConversationCase(
                messages=SINGLE, says=["<think>\n\n</think>\n\n" + QWEN[0]], template={"enable_thinking": True}
            ),
            "thought": ConversationCase(messages=thinking(SINGLE), says=join_pairwise(QWEN_THOUGHTS, QWEN[:1])),
            "thoughts": ConversationCase(
                messages=thinking(MULTI), says=join_pairwise(QWEN_THOUGHTS, QWEN), rewritten=True
            ),
            "thoughts of a call": ConversationCase(
                messages=thinking(TOOL), says=join_pairwise(QWEN_THOUGHTS, [QWEN_CALL, QWEN[0]]), tools=TOOLS
            ),
            "thoughts, calls and turns": ConversationCase(
                messages=thinking(TOOL_MULTI),
                says=join_pairwise(QWEN_THOUGHTS, [QWEN_CALL, *QWEN]),
                tools=TOOLS,
                rewritten=True,
            ),
        },
    ),
    "qwen3-thinking-2507": Family(  # every prompt opens a thought
        markers=QWEN_MARKERS,
        bos="<|endoftext|>",
        eos="<|im_end|>",
        like="qwen3",
        replaced=(QWEN_SWITCH, "{{- '<think>\\n' }}"),
        cases={
            "no thought": ConversationCase(messages=SINGLE, says=["\n</think>\n\n" + QWEN[0]]),
            "thoughts": ConversationCase(
                messages=thinking(MULTI), says=join_pairwise(QWEN_OPEN_THOUGHTS, QWEN), rewritten=True
            ),
            "thoughts of a call": ConversationCase(
                messages=thinking(TOOL), says=join_pairwise(QWEN_OPEN_THOUGHTS, [QWEN_CALL, QWEN[0]]), tools=TOOLS
            ),
        },
    ),
    "llama-3.1": Family(
        markers=(
            "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
            "<|python_tag|>"
        ).split(),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        cases={
            "single": ConversationCase(messages=SINGLE, says=[f"{REPLY}<|eot_id|>"]),
            "multi": ConversationCase(messages=MULTI, says=[f"{REPLY}<|eot_id|>", f"{REPLY_2}<|eot_id|>"]),
            "tools": ConversationCase(
                messages=TOOL_MULTI, tools=TOOLS, says=[LLAMA_CALL, f"{REPLY}<|eot_id|>", f"{REPLY_2}<|eot_id|>"]
            ),
        },
    ),
    "mistral-v0.3": Family(
        markers=(
            "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
        ).split(),
        bos="<s>",
        eos="</s>",
        cases={
            "single": ConversationCase(messages=SINGLE[1:], says=[f" {REPLY}</s>"]),
            "multi": ConversationCase(messages=MULTI[1:], says=[f" {REPLY}</s>", f" {REPLY_2}</s>"]),
            "system": ConversationCase(messages=MULTI, says=[f" {REPLY}</s>", f" {REPLY_2}</s>"], rewritten=True),
            "tools": ConversationCase(messages=TOOL, tools=TOOLS, says=[MISTRAL_CALL, f" {REPLY}</s>"]),
            "tools, turns": ConversationCase(
                messages=TOOL_MULTI,
                tools=TOOLS,
                rewritten=True,
                says=[MISTRAL_CALL, f" {REPLY}</s>", f" {REPLY_2}</s>"],
            ),
        },
    ),
    "mistral-v7": Family(
        markers=(
            "<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
            "[/TOOL_RESULTS] [TOOL_CONTENT] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]"
        ).split(),
        bos="<s>",
        eos="</s>",
        cases={
            "multi": ConversationCase(messages=MULTI, says=[f"{REPLY}</s>", f"{REPLY_2}</s>"]),
            "tools": ConversationCase(messages=TOOL, tools=TOOLS, says=[TEKKEN_CALL, f"{REPLY}</s>"]),
            "tools, turns": ConversationCase(
                messages=TOOL_MULTI, tools=TOOLS, rewritten=True, says=[TEKKEN_CALL, f"{REPLY}</s>", f"{REPLY_2}</s>"]
            ),
            "two calls": ConversationCase(messages=TWICE, tools=TOOLS, says=[TEKKEN_CALLS, f"{REPLY}</s>"]),
        },
    ),
    "gemma-3": Family(
        markers=["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "\n\n", "<h1>"],
        bos="<bos>",
        eos="<eos>",
        cases={
            "single": ConversationCase(messages=SINGLE, says=[f"{REPLY}<end_of_turn>"]),
            "multi": ConversationCase(messages=MULTI, says=[f"{REPLY}<end_of_turn>", f"{REPLY_2}<end_of_turn>"]),
            "tools": ConversationCase(  # the format has none: definitions, calls and results are text
                messages=[
                    QUESTION,
                    {"role": "assistant", "content": "[weather(city='Oslo')]"},
                    {"role": "user", "content": "7"},
                    ANSWER,
                ],
                says=["[weather(city='Oslo')]<end_of_turn>", f"{REPLY}<end_of_turn>"],
            ),
        },
    ),
    "harmony": Family(
        markers=(
            "<|startoftext|> <|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|>"
        ).split(),
        bos="<|startoftext|>",
        eos="<|return|>",
        cases={
            "single": ConversationCase(messages=SINGLE, says=HARMONY[:1]),
            "multi": ConversationCase(messages=MULTI, says=HARMONY, rewritten=True),
            "tools": ConversationCase(messages=TOOL, tools=TOOLS, says=[HARMONY_CALL, HARMONY[0]]),
            "thought": ConversationCase(messages=thinking(SINGLE), says=join_pairwise(HARMONY_THOUGHTS, HARMONY[:1])),
            "thoughts": ConversationCase(
                messages=thinking(MULTI), says=join_pairwise(HARMONY_THOUGHTS, HARMONY), rewritten=True
            ),
            "thoughts of a call": ConversationCase(
                messages=thinking(TOOL),
                tools=TOOLS,
                rewritten=True,
                says=join_pairwise(HARMONY_THOUGHTS, [HARMONY_CALL, HARMONY[0]]),
            ),
            "thoughts, calls and turns": ConversationCase(
                messages=thinking(TOOL_MULTI),
                tools=TOOLS,
                rewritten=True,
                says=join_pairwise(HARMONY_THOUGHTS, [HARMONY_CALL, *HARMONY]),
            ),
        },
    ),
}
CASES = [(name, case) for name, family in FAMILIES.items() for case in family.cases]
