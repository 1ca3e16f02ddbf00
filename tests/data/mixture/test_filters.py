"""Rows of every published format become prompts; a row that cannot be used has exactly one reason."""

import json
import random
from datetime import datetime

import pytest

from data.config import TurnSelection
from data.mixture.filters import FilterRules, filter_row
from data.prepare_config import MixtureConf, SourceConf
from data.sources.prepared_rows import PreparedRow, parse_prepared_row, row_from_columns
from data.sources.prompt_formats import PROMPT_FORMATS
from data.sources.rows import Conversation, RowRejectedError
from data.sources.text_hashes import prompt_hashes

MIXTURE = MixtureConf(sources={"s": SourceConf(path="x")}, held_out=0.0, max_chars=200)
RULES = FilterRules(mixture=MIXTURE, replace_answers=False, excluded_hashes=set())
CHAT = [("user", "Hi"), ("assistant", "Hello")]
CALL = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": '{"hour": 3}'}}
TOOLS = [{"type": "function", "function": {"name": "tide"}}]


def build_messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


def filter_raw_row(raw: dict, rules: FilterRules = RULES, **source) -> PreparedRow:
    return row_from_columns(filter_row(raw, "s", SourceConf(path="x", **source), rules))


WHEN = {"timestamp": datetime(2026, 1, 1), "hashed_ip": "0f"}
SHAPES = {
    "WildChat": {"conversations": [{**m, **WHEN} for m in build_messages(*CHAT)], "when": WHEN},
    "OpenAI messages": {"messages": build_messages(*CHAT)},
    "messages as JSON": {"messages": json.dumps(build_messages(*CHAT))},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello", "tool_calls": None},
        ]
    },
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "ShareGPT in messages": {"conversations": build_messages(*CHAT)},
    "UltraChat 200k": {"prompt": "Hi", "prompt_id": "7", "messages": build_messages(*CHAT)},
    "UltraChat": {"data": ["Hi", "Hello"]},
    "Alpaca": {"instruction": "Hi", "input": "", "output": "Hello", "text": "### Hi ### Hello"},
    "GSM8K": {"question": "Hi", "answer": "Hello"},
    "OpenOrca": {"question": "Hi", "response": "Hello", "system_prompt": ""},
    "problems": {"problem": "Hi", "solution": "Hello"},
    "prompts": {"prompt": "Hi", "completion": "Hello"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_format_yields_the_same_conversation(shape):
    row = filter_raw_row(SHAPES[shape])
    assert [(m["role"], m["content"]) for m in row.messages or []] == CHAT
    assert row.text is None
    assert "hashed_ip" not in str(row)


@pytest.mark.parametrize("name", sorted({form.columns[-1] for form in PROMPT_FORMATS.values()}))
def test_a_mapped_question_replaces_every_column_that_could_be_it(name):
    row = filter_raw_row({name: "old", "asked": "Hi"}, columns={"prompt": "asked"})
    assert row.messages == build_messages(CHAT[0])


def test_prompts_without_answers_are_questions():
    assert filter_raw_row({"prompt": "Hi"}).messages == build_messages(CHAT[0])
    assert filter_raw_row({"prompt": build_messages(CHAT[0])}).messages == build_messages(CHAT[0])
    turns = {"question_id": 81, "turns": ["Hi", "Bye"]}
    anew = FilterRules(**{**vars(RULES), "replace_answers": True})
    assert filter_raw_row(turns, anew).messages == build_messages(CHAT[0], ("assistant", ""), ("user", "Bye"))
    with pytest.raises(RowRejectedError, match="an empty turn"):  # nobody would fill it
        filter_raw_row(turns)


def test_a_plain_text_stays_text():
    row = filter_raw_row({"text": "Once upon a time"})
    assert (row.text, row.messages) == ("Once upon a time", None)
    assert filter_raw_row({"prompt": "Once"}, columns={"text": "prompt"}).text == "Once"


@pytest.mark.parametrize(
    "calls",
    [[CALL], json.dumps([CALL]), CALL, [{**CALL, "function": {"name": "tide", "arguments": {"hour": 3}}}]],
    ids=["list", "JSON", "single", "values"],
)
def test_tool_calls_are_read_in_every_form(calls):
    conversation = [
        *build_messages(("user", "Tide?")),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "function", "name": "tide", "content": "low"},
    ]
    row = filter_raw_row({"messages": conversation, "tools": json.dumps(TOOLS)})
    assert row.tools == TOOLS
    assert row.messages is not None
    assert row.messages[2] == {"role": "tool", "name": "tide", "content": "low"}
    assert row.messages[1]["tool_calls"] == [{**CALL, "function": {"name": "tide", "arguments": {"hour": 3}}}]


def test_a_column_decides_the_format_only_if_it_holds_a_list():
    """`data` may be a date, and `ids` may be a key."""
    assert filter_raw_row({"data": "2026-01-01", "text": "Once"}).text == "Once"
    assert filter_raw_row({"ids": "7", "prompt": "Hi"}).messages == build_messages(CHAT[0])
    spaced = json.dumps(build_messages(*CHAT), indent=1)
    assert filter_raw_row({"messages": spaced}).messages == build_messages(*CHAT)
    for broken in (spaced[:-2], str(build_messages(*CHAT))):
        with pytest.raises(RowRejectedError, match="column messages holds a list that is not JSON"):
            filter_raw_row({"messages": broken})


def test_columns_of_any_name_are_mapped():
    raw = {"chat": build_messages(*CHAT), "text": "noise", "uid": 7, "topic": "tides", "spdx": "MIT"}
    names = {"messages": "chat", "id": "uid", "category": "topic", "license": "spdx"}
    row = filter_raw_row(raw, columns=names)
    assert row.messages == build_messages(*CHAT)
    assert (row.id[:2], row.category, row.license) == ("7-", "tides", "MIT")
    with pytest.raises(RowRejectedError, match="no column chat"):
        filter_raw_row({"text": "noise"}, columns=names)


def test_a_mapped_question_keeps_its_answer_and_its_input():
    row = filter_raw_row({"query": "Hi", "text": "noise", "response": "Hello"}, columns={"prompt": "query"})
    assert row.messages == build_messages(("user", "Hi"), ("assistant", "Hello"))
    best = {"query": "Hi", "output": "bad", "best": "Hello"}
    row = filter_raw_row(best, columns={"prompt": "query", "answer": "best"})
    assert row.messages == build_messages(("user", "Hi"), ("assistant", "Hello"))
    task = {"task": "Translate.", "input": "Hi", "output": "Hallo"}
    row = filter_raw_row(task, columns={"instruction": "task"})
    assert row.messages == build_messages(("user", "Translate.\n\nHi"), ("assistant", "Hallo"))


def test_an_instruction_follows_its_history():
    raw = {"instruction": "And 3?", "output": "9", "history": [["2?", "4"]]}
    turns = [("user", "2?"), ("assistant", "4"), ("user", "And 3?"), ("assistant", "9")]
    assert filter_raw_row(raw).messages == build_messages(*turns)
    assert filter_raw_row(raw | {"history": "of Rome"}).messages == build_messages(*turns[2:])


def test_an_empty_question_at_the_end_asks_nothing():
    messages = [*build_messages(*CHAT[:2]), {"role": "user", "content": " "}]
    assert filter_raw_row({"messages": messages}).messages == build_messages(*CHAT[:2])
    with pytest.raises(RowRejectedError, match="an empty turn"):
        filter_raw_row({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": ""}]})


def test_the_first_column_that_holds_messages_counts():
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    row = filter_raw_row({"messages": [], "conversations": turns})
    assert row.messages == build_messages(("user", "Hi"), ("assistant", "Hello"))


def test_labels_of_the_source_hold_for_rows_without_their_own():
    labels = {"license": "MIT", "category": "c", "language": "en", "template": {"a": 1, "b": 2}}
    row = filter_raw_row({"prompt": "Hi", "category": "own", "template": {"b": 3}}, **labels)
    assert (row.license, row.category, row.language) == ("MIT", "own", "en")
    row = filter_raw_row({"messages": build_messages(*CHAT), "template": {"b": 3}, "license": "CC0"}, **labels)
    assert (row.license, row.template) == ("CC0", {"a": 1, "b": 3})


def test_each_row_gets_one_of_a_list_of_template_arguments_always_the_same():
    modes = {"template": {"enable_thinking": [True, False]}}
    templates = [filter_raw_row({"prompt": f"Question {n}"}, **modes).template for n in range(200)]
    thinking = sum(template["enable_thinking"] for template in templates)
    assert 70 <= thinking <= 130
    assert templates == [filter_raw_row({"prompt": f"Question {n}"}, **modes).template for n in range(200)]
    own = {"messages": build_messages(*CHAT), "template": {"documents": ["a", "b"]}}
    assert filter_raw_row(own).template == {"documents": ["a", "b"]}


FAULTS = {
    "an unknown role": {"messages": build_messages(("narrator", "Hi"))},
    "no user turn": {"messages": build_messages(("system", "Hi"))},
    "a message whose content is not text": {"messages": [{"role": "user", "content": 5}]},
    "a message that is not an object": {"messages": [{"role": "user", "content": "a"}, "b"]},
    "an empty turn": {"messages": build_messages(("user", " \n"), CHAT[1])},
    "a tool call without a function's name": {
        "messages": [*build_messages(CHAT[0]), {"role": "assistant", "tool_calls": [{}]}]
    },
    "tool_calls that are not JSON": {
        "messages": [
            *build_messages(CHAT[0]),
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        ]
    },
    "no messages, text or prompt": {"caption": "Hi"},
    "a prompt that is not text": {"prompt": 5},
    "half of a surrogate pair": {"messages": build_messages(("user", "\ud83d"))},
    "a number that JSON does not have": {"messages": build_messages(*CHAT), "template": {"temperature": float("nan")}},
    "token ids without their text": {"ids": [1], "answer": [True]},
    "longer than 200 characters": {"prompt": "a" * 201},
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_row_that_cannot_be_used_has_its_reason(reason):
    with pytest.raises(RowRejectedError) as rejected:
        filter_raw_row(FAULTS[reason])
    assert str(rejected.value) == reason


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "Hello", "reasoning_content": "a" * 195},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"text": "a" * 190}}}]},
    ],
    ids=["reasoning", "tool calls"],
)
def test_reasoning_and_tool_calls_count_for_the_length_of_a_row(answer):
    raw = {"messages": [*build_messages(CHAT[0]), {"role": "assistant", **answer}]}
    with pytest.raises(RowRejectedError, match="longer than 200 characters"):
        filter_raw_row(raw)
    answers_dropped = FilterRules(mixture=MIXTURE, replace_answers=True, excluded_hashes=set())
    assert filter_raw_row(raw, answers_dropped).messages


def test_a_prepared_answer_that_was_cut_stays_one():
    row = filter_raw_row({"messages": build_messages(*CHAT), "finish_reason": "length"})
    [parsed] = parse_prepared_row(row, TurnSelection.auto)
    assert isinstance(parsed, Conversation)
    assert parsed.messages[-1] == {"role": "assistant", "content": "Hello", "finish_reason": "length"}


@pytest.mark.parametrize("column", ["id", "category", "license"])
def test_half_of_a_surrogate_pair_is_found_in_every_column(column):
    with pytest.raises(RowRejectedError, match="half of a surrogate pair"):
        filter_raw_row({"prompt": "Hi", column: "\ud83d"})


def test_prompts_held_out_elsewhere_are_found_in_any_turn_and_spelling():
    held_out = "Why does the tide turn twice a day and not once, as the moon does?"
    rules = FilterRules(**{**vars(RULES), "excluded_hashes": set(prompt_hashes(held_out, held_out))})
    question = {"prompt": f" {held_out.upper()}\n"}
    later = {"messages": build_messages(*CHAT, ("user", held_out))}
    answer = {"messages": build_messages(CHAT[0], ("assistant", held_out + " Because.")), "id": 1}
    for raw in (question, later, answer, {"text": held_out + " It is so."}):
        with pytest.raises(RowRejectedError, match="a prompt that is held out elsewhere"):
            filter_raw_row(raw, rules)
    filter_raw_row({"prompt": held_out + " Tell me."}, rules)


def test_rows_with_the_same_questions_are_duplicates():
    def compute_sign(raw: dict) -> int:
        return filter_row(raw, "s", SourceConf(path="x"), RULES)["sign"]

    signature = compute_sign({"messages": build_messages(*CHAT)})
    assert compute_sign({"messages": build_messages(("user", " hI\n"))}) == signature
    assert compute_sign({"prompt": "Caf\u00e9?"}) == compute_sign({"prompt": "CAFE\u0301?"})
    assert compute_sign({"messages": build_messages(CHAT[0], ("assistant", "Another answer."))}) == signature
    for other in (
        {"messages": build_messages(("system", "Be brief."), *CHAT)},
        {"messages": build_messages(*CHAT, ("user", "Bye"))},
        {"messages": build_messages(*CHAT), "tools": TOOLS},
    ):
        assert compute_sign(other) != signature


def test_an_empty_system_prompt_is_none():
    assert filter_raw_row({"messages": build_messages(("system", ""), *CHAT)}).messages == build_messages(*CHAT)


def test_random_rows_are_used_or_rejected_and_never_stop_the_run():

    rng = random.Random(0)
    atoms = [None, 5, 1.5, True, "", "text", "[{", '["a"]', "\ud800", [], {}, [5], ["a"], [None]]
    keys = (
        "messages conversations data text prompt turns question_id tools role content from value tool_calls "
        "function name arguments template id ids answer instruction input system"
    ).split()

    def draw_value(depth: int):
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return rng.choice(atoms)
        if kind < 0.6:
            return [draw_value(depth - 1) for _ in range(rng.randrange(4))]
        if kind < 0.8:
            return build_messages(("user", draw_value(0)), ("assistant", draw_value(depth - 1)))
        return {rng.choice(keys): draw_value(depth - 1) for _ in range(rng.randrange(5))}

    used = 0
    for _ in range(3000):
        raw = {rng.choice(keys): draw_value(4) for _ in range(rng.randrange(1, 6))}
        try:
            filter_raw_row(raw, template={"mode": ["a", "b"]})
            used += 1
        except (RowRejectedError, UnicodeEncodeError):
            pass
    assert 50 < used < 2950
