"""Rows of every published shape become what is asked; one that cannot be used has one reason."""

import json
import random
from datetime import datetime

import pytest

from data.mixture.filters import FilterRules, filter_row
from data.prepare_config import MixtureConf, SourceConf
from data.sources.prepared_rows import PreparedRow, row_from_columns
from data.sources.rows import RowRejectedError
from data.sources.text_hashes import prompt_hashes

MIXTURE = MixtureConf(sources={"s": SourceConf(path="x")}, held_out=0.0, max_chars=200)
RULES = FilterRules(mixture=MIXTURE, replace_answers=False, excluded_hashes=set())
CHAT = [("user", "Hi"), ("assistant", "Hello")]
CALL = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": '{"hour": 3}'}}
TOOLS = [{"type": "function", "function": {"name": "tide"}}]


def messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


def made(raw: dict, rules: FilterRules = RULES, **source) -> PreparedRow:
    return row_from_columns(filter_row(raw, "s", SourceConf(path="x", **source), rules))


WHEN = {"timestamp": datetime(2026, 1, 1), "hashed_ip": "0f"}
SHAPES = {
    "WildChat": {"conversations": [{**m, **WHEN} for m in messages(*CHAT)], "when": WHEN},
    "OpenAI messages": {"messages": messages(*CHAT)},
    "messages as JSON": {"messages": json.dumps(messages(*CHAT))},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello", "tool_calls": None},
        ]
    },
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "ShareGPT in messages": {"conversations": messages(*CHAT)},
    "UltraChat 200k": {"prompt": "Hi", "prompt_id": "7", "messages": messages(*CHAT)},
    "UltraChat": {"data": ["Hi", "Hello"]},
    "Alpaca": {"instruction": "Hi", "input": "", "output": "Hello", "text": "### Hi ### Hello"},
    "GSM8K": {"question": "Hi", "answer": "Hello"},
    "OpenOrca": {"question": "Hi", "response": "Hello", "system_prompt": ""},
    "problems": {"problem": "Hi", "solution": "Hello"},
    "prompts": {"prompt": "Hi", "completion": "Hello"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_the_same_conversation(shape):
    row = made(SHAPES[shape])
    assert [(m["role"], m["content"]) for m in row.messages or []] == CHAT
    assert row.text is None
    assert "hashed_ip" not in str(row)


def test_prompts_without_answers_are_questions():
    assert made({"prompt": "Hi"}).messages == messages(CHAT[0])
    assert made({"prompt": messages(CHAT[0])}).messages == messages(CHAT[0])
    turns = {"question_id": 81, "turns": ["Hi", "Bye"]}
    anew = FilterRules(**{**vars(RULES), "replace_answers": True})
    assert made(turns, anew).messages == messages(CHAT[0], ("assistant", ""), ("user", "Bye"))
    with pytest.raises(RowRejectedError, match="an empty turn"):  # nobody would fill it
        made(turns)


def test_a_text_is_a_text():
    row = made({"text": "Once upon a time"})
    assert (row.text, row.messages) == ("Once upon a time", None)
    assert made({"prompt": "Once"}, columns={"text": "prompt"}).text == "Once"


def test_tools_and_their_calls_come_along_as_values():
    said = [
        *messages(("user", "Tide?")),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "function", "name": "tide", "content": "low"},
        *messages(("assistant", "Low.")),
    ]
    row = made({"messages": said, "tools": json.dumps(TOOLS)})
    assert row.tools == TOOLS
    assert row.messages is not None
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"hour": 3}
    assert row.messages[2] == {"role": "tool", "name": "tide", "content": "low"}


@pytest.mark.parametrize(
    "calls",
    [[CALL], json.dumps([CALL]), CALL, [{**CALL, "function": {"name": "tide", "arguments": {"hour": 3}}}]],
    ids=["list", "JSON", "one", "values"],
)
def test_tool_calls_are_read_however_they_are_kept(calls):
    said = [*messages(("user", "Tide?")), {"role": "assistant", "tool_calls": calls}]
    row = made({"messages": said})
    assert row.messages is not None
    assert row.messages[1]["tool_calls"] == [{**CALL, "function": {"name": "tide", "arguments": {"hour": 3}}}]


def test_a_list_tells_the_shape_and_a_text_of_the_same_column_does_not():
    """`data` may be a date and `ids` a key."""
    assert made({"data": "2026-01-01", "text": "Once"}).text == "Once"
    assert made({"ids": "7", "prompt": "Hi"}).messages == messages(CHAT[0])
    spaced = json.dumps(messages(*CHAT), indent=1)
    assert made({"messages": spaced}).messages == messages(*CHAT)
    for broken in (spaced[:-2], str(messages(*CHAT))):
        with pytest.raises(RowRejectedError, match="column messages holds a list that is not JSON"):
            made({"messages": broken})


def test_columns_of_any_name_are_mapped():
    raw = {"chat": messages(*CHAT), "text": "noise", "uid": 7, "topic": "tides", "spdx": "MIT"}
    names = {"messages": "chat", "id": "uid", "category": "topic", "license": "spdx"}
    row = made(raw, columns=names)
    assert row.messages == messages(*CHAT)
    assert (row.id[:2], row.category, row.license) == ("7-", "tides", "MIT")
    with pytest.raises(RowRejectedError, match="no column chat"):
        made({"text": "noise"}, columns=names)


def test_what_the_source_says_holds_for_rows_that_do_not_say_it():
    told = {"license": "MIT", "category": "c", "language": "en", "template": {"a": 1, "b": 2}}
    row = made({"prompt": "Hi", "category": "own", "template": {"b": 3}}, **told)
    assert (row.license, row.category, row.language) == ("MIT", "own", "en")
    row = made({"messages": messages(*CHAT), "template": {"b": 3}, "license": "CC0"}, **told)
    assert (row.license, row.template) == ("CC0", {"a": 1, "b": 3})


def test_of_a_list_of_template_arguments_each_row_keeps_its_own():
    modes = {"template": {"enable_thinking": [True, False]}}
    found = [made({"prompt": f"Question {n}"}, **modes).template for n in range(200)]
    thinking = sum(template["enable_thinking"] for template in found)
    assert 70 <= thinking <= 130
    assert found == [made({"prompt": f"Question {n}"}, **modes).template for n in range(200)]
    own = {"messages": messages(*CHAT), "template": {"documents": ["a", "b"]}}
    assert made(own).template == {"documents": ["a", "b"]}


FAULTS = {
    "an unknown role": {"messages": messages(("narrator", "Hi"))},
    "no user turn": {"messages": messages(("system", "Hi"))},
    "a message whose content is not text": {"messages": [{"role": "user", "content": 5}]},
    "a message that is not an object": {"messages": [{"role": "user", "content": "a"}, "b"]},
    "an empty turn": {"messages": messages(("user", " \n"), CHAT[1])},
    "a tool call without a function's name": {
        "messages": [*messages(CHAT[0]), {"role": "assistant", "tool_calls": [{}]}]
    },
    "tool_calls that are not JSON": {
        "messages": [
            *messages(CHAT[0]),
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        ]
    },
    "no messages, text or prompt": {"caption": "Hi"},
    "a prompt that is not text": {"prompt": 5},
    "half of a surrogate pair": {"messages": messages(("user", "\ud83d"))},
    "a number that JSON does not have": {"messages": messages(*CHAT), "template": {"temperature": float("nan")}},
    "token ids without their text": {"ids": [1], "answer": [True]},
    "longer than 200 characters": {"prompt": "a" * 201},
}


@pytest.mark.parametrize("reason", FAULTS)
def test_what_cannot_be_used_has_its_reason(reason):
    with pytest.raises(RowRejectedError) as misfit:
        made(FAULTS[reason])
    assert str(misfit.value) == reason


@pytest.mark.parametrize("column", ["id", "category", "license"])
def test_half_of_a_surrogate_pair_is_found_in_every_column(column):
    with pytest.raises(RowRejectedError, match="half of a surrogate pair"):
        made({"prompt": "Hi", column: "\ud83d"})


def test_prompts_held_out_elsewhere_are_found_in_any_turn_and_spelling():
    held_out = "Why does the tide turn twice a day and not once, as the moon does?"
    rules = FilterRules(**{**vars(RULES), "excluded_hashes": set(prompt_hashes(held_out, held_out))})
    first = {"prompt": f" {held_out.upper()}\n"}
    later = {"messages": messages(*CHAT, ("user", held_out))}
    begun = {"messages": messages(CHAT[0], ("assistant", held_out + " Because.")), "id": 1}
    for raw in (first, later, begun, {"text": held_out + " It is so."}):
        with pytest.raises(RowRejectedError, match="a prompt that is held out elsewhere"):
            made(raw, rules)
    made({"prompt": held_out + " Tell me."}, rules)


def test_rows_are_duplicates_by_what_they_ask():
    def sign(raw: dict) -> int:
        return filter_row(raw, "s", SourceConf(path="x"), RULES)["sign"]

    asked = sign({"messages": messages(*CHAT)})
    assert sign({"messages": messages(("user", " hI\n"))}) == asked
    assert sign({"prompt": "Caf\u00e9?"}) == sign({"prompt": "CAFE\u0301?"})
    assert sign({"messages": messages(CHAT[0], ("assistant", "Another answer."))}) == asked
    for other in (
        {"messages": messages(("system", "Be brief."), *CHAT)},
        {"messages": messages(*CHAT, ("user", "Bye"))},
        {"messages": messages(*CHAT), "tools": TOOLS},
    ):
        assert sign(other) != asked


def test_an_empty_system_prompt_is_none():
    assert made({"messages": messages(("system", ""), *CHAT)}).messages == messages(*CHAT)


def test_no_garbage_stops_the_run():
    """Whatever stands where, a row is used or it is counted."""
    rng = random.Random(0)
    atoms = [None, 5, 1.5, True, "", "text", "[{", '["a"]', "\ud800", [], {}, [5], ["a"], [None]]
    keys = [
        "messages",
        "conversations",
        "data",
        "text",
        "prompt",
        "turns",
        "question_id",
        "tools",
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "template",
        "id",
        "ids",
        "answer",
        "instruction",
        "input",
        "system",
    ]

    def value(depth: int):
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return rng.choice(atoms)
        if kind < 0.6:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind < 0.8:
            return messages(("user", value(0)), ("assistant", value(depth - 1)))
        return {rng.choice(keys): value(depth - 1) for _ in range(rng.randrange(5))}

    used = 0
    for _ in range(3000):
        raw = {rng.choice(keys): value(4) for _ in range(rng.randrange(1, 6))}
        try:
            made(raw, template={"mode": ["a", "b"]})
            used += 1
        except (RowRejectedError, UnicodeEncodeError):
            pass
    assert 50 < used < 2950
