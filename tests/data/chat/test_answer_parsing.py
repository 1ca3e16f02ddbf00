"""Answers become the messages that templates write as the target did, and answers that were cut end where they did."""

import pytest

from data.chat.answer_parsing import build_exact_message, message_from_text, parse_tool_calls
from data.chat.template import ChatTemplate
from data.chat.tokenization import documents_from_row
from data.config import DataConf, DataSource
from data.sources.row_formats import parse_row
from tests.support.data.families import ANSWER, FAMILIES, QUESTION

CONF = DataConf(source=DataSource.jsonl, path="x")
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
THOUGHT = "Hm. It is winter, so"
REJECTED = "an answer that was cut where the chat template rewrites it"


def read_cut_answer(family, answer, **columns):
    """Return prompt and answer of a row that was cut, as they are learned, or the reasons why the row is left out."""
    tokenizer = FAMILIES[family].tokenizer(family)
    raw = {"messages": [QUESTION], "answer": answer, "finish_reason": "length", **columns}
    documents, rejected = documents_from_row(parse_row(raw), CONF, tokenizer)
    if not documents:
        return dict(rejected)
    [document] = documents
    begin = document.answer.index(True)
    assert all(document.answer[begin:])
    return tokenizer.decode(document.ids[:begin]), tokenizer.decode(document.ids[begin:])


@pytest.mark.parametrize("columns", [{}, THINKING])
@pytest.mark.parametrize(
    "answer", [f"<think>\n{THOUGHT}", [{"role": "assistant", "content": "", "reasoning_content": THOUGHT}]]
)
def test_a_thought_that_was_cut_is_learned_to_its_last_word_behind_the_served_prompt(answer, columns):
    prompt, learned = read_cut_answer("qwen3", answer, **columns)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert learned == f"<think>\n{THOUGHT}"


@pytest.mark.parametrize(
    ("family", "answer", "expected"),
    [
        ("qwen3", f"<think>\n{THOUGHT}\n</think>\n\nIt is", f"<think>\n{THOUGHT}\n</think>\n\nIt is"),
        ("qwen3", "i", "i"),  # a letter of the end that the template writes
        ("llama-3.1", "It is ", "It is"),  # the template strips the space
        ("gemma-3", "It is", "It is"),
        ("harmony", "It is", "<|channel|>final<|message|>It is"),
    ],
)
def test_an_answer_that_was_cut_is_learned_without_the_end_that_its_template_writes(family, answer, expected):
    assert read_cut_answer(family, answer)[1] == expected


def test_a_cut_thought_that_the_template_drops_is_left_out_and_counted():
    assert read_cut_answer("llama-3.1", f"<think>{THOUGHT}") == {REJECTED: 1}


@pytest.mark.parametrize("text", ["Write <think> first and </think> last; strip both.", ANSWER["content"]])
def test_a_text_that_only_mentions_a_thought_stays_whole(text):
    chat = ChatTemplate(tokenizer=FAMILIES["llama-3.1"].tokenizer("llama-3.1"))
    assert build_exact_message(chat, [QUESTION], text) == {"role": "assistant", "content": text}


def test_channels_become_reasoning_and_content():
    text = "<|channel|>analysis<|message|>17 * 23 = 391.<|end|><|start|>assistant<|channel|>final<|message|>391."
    message = message_from_text(text)
    assert (message["content"], message["reasoning_content"]) == ("391.", "17 * 23 = 391.")


def test_an_answer_that_repeats_a_bracket_to_its_limit_calls_no_tool():
    assert parse_tool_calls('{"x": ' + "[" * 100_000) == []
    assert parse_tool_calls(f'to=functions.add<|message|>{{"x": {"[" * 100_000}}}')[0][0] == "add"
