"""System prompts, tools and tool calls reach the chat template in whatever form a row has them."""

import json

import pytest

from data.eval_prompts.prompts import load_eval_prompts
from data.sources.prompt_formats import prompt_from_row
from data.sources.row_formats import parse_row, truncate_to_last_answer
from data.sources.rows import Conversation, RowRejectedError
from tests.support.data.families import FAMILIES

FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
QUESTION, ANSWER = {"role": "user", "content": "How warm is Oslo?"}, {"role": "assistant", "content": "3 degrees."}
RESULT = {"role": "tool", "content": '{"celsius": 3}'}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
FORMS = {
    "texts": {
        "conversations": [
            {"from": "human", "value": QUESTION["content"]},
            {"from": "gpt", "value": CALL_TEXT},
            {"from": "tool", "value": '<tool_response>\n{"celsius": 3}\n</tool_response>'},
            {"from": "gpt", "value": ANSWER["content"]},
        ],
        "tools": json.dumps(TOOLS),
    },
    "turns of calls": {
        "conversations": [
            {"from": "human", "value": QUESTION["content"]},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": RESULT["content"]},
            {"from": "gpt", "value": ANSWER["content"]},
        ],
        "tools": json.dumps(TOOLS),
    },
    "functions": {
        "messages": [
            QUESTION,
            {"role": "assistant", "content": None, "function_call": json.loads(json.dumps(CALL["function"]))},
            {"role": "function", "content": RESULT["content"]},
            ANSWER,
        ],
        "functions": [FUNCTION],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_older_forms_of_tool_calls_are_those_of_today(form):
    row = parse_row(FORMS[form])
    assert row.messages == [QUESTION, CALLING, RESULT, ANSWER]
    assert row.tools == TOOLS


@pytest.mark.parametrize("columns", [{"tools": "calculator"}, {"tools": ["calculator"]}, {"template": "alpaca"}])
def test_columns_of_a_question_may_be_about_something_else(columns):
    row = {"question": QUESTION["content"], "system": "Be brief."} | columns
    assert prompt_from_row(row, 0) == {
        "id": "0",
        "category": "all",
        "turns": [QUESTION["content"]],
        "system": "Be brief.",
    }


@pytest.mark.parametrize("call", [{"name": None, "arguments": None}, "none", {}])
def test_a_placeholder_is_no_call(call):
    messages = [QUESTION, ANSWER | {"function_call": call}]
    assert parse_row({"messages": messages}).messages == [QUESTION, ANSWER]


@pytest.mark.parametrize("value", ["sin, cos", {"name": "f"}, ["f"], []])
def test_a_column_of_functions_may_be_about_something_else(value):
    assert parse_row({"messages": [QUESTION, ANSWER], "functions": value}).tools is None


def test_a_call_without_a_result_is_a_text_about_calls():
    texts = [QUESTION, {"role": "assistant", "content": f"Write {CALL_TEXT} for it."}]
    assert parse_row({"messages": texts}).messages == texts
    broken = [QUESTION, {"role": "assistant", "content": "<tool_call>weather()</tool_call>"}, RESULT, ANSWER]
    assert parse_row({"messages": broken}).messages == broken


def test_what_follows_the_last_answer_may_be_empty():
    row = parse_row({"messages": [QUESTION, ANSWER, {"role": "user", "content": ""}]})
    cut = truncate_to_last_answer(row)
    assert isinstance(cut, Conversation)
    assert cut.messages == [QUESTION, ANSWER]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [({"tools": "{}}"}, "tools that are not JSON"), ({"template": [1]}, "a template that is not an object")],
)
def test_inputs_of_a_wrong_type_reject_the_row(columns, reason):
    with pytest.raises(RowRejectedError, match=reason):
        parse_row({"messages": [QUESTION, ANSWER]} | columns)


@pytest.mark.parametrize(
    "columns",
    [
        {"system": "You are a pirate."},
        {"tools": json.dumps(TOOLS)},
        {"template": {"enable_thinking": False}},
        {"template": None, "chat_template_kwargs": json.dumps({"enable_thinking": False})},
        {"system": "You are a pirate.", "tools": TOOLS, "template": {"enable_thinking": False}},
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        {"messages": [QUESTION]},
        {"messages": [QUESTION, {"role": "assistant", "content": CALL_TEXT}, RESULT, QUESTION]},
        {"prompt": [QUESTION]},
        {"question": QUESTION["content"]},
    ],
)
def test_a_prompt_that_judges_is_rendered_as_it_is_in_training(tmp_path, form, columns):
    tokenizer = FAMILIES["qwen3"].tokenizer("qwen3")
    (tmp_path / "prompts.jsonl").write_text(json.dumps(form | columns))
    (prompt,) = load_eval_prompts(tokenizer, str(tmp_path / "prompts.jsonl"), limit=None)
    row = parse_row(form | columns)
    expected = tokenizer.apply_chat_template(
        row.messages, tools=row.tools, add_generation_prompt=True, tokenize=False, **row.template
    )
    assert tokenizer.decode(prompt.ids) == expected
