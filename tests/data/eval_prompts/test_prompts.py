"""Held-out prompts are read in every known layout, or refused with line and reason."""

import copy
import json
import logging
from functools import partial

import pytest

from data.eval_prompts.prompts import (
    build_next_turns,
    fingerprint_prompts,
    load_calibration_prompts,
    load_eval_prompts,
    read_prompt_rows,
)
from models.io.errors import UserError
from tests.support.data.families import FAMILIES

TEMPLATE = (
    "{% for m in messages %}{{ 58 if m.role == 'user' else 59 }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}59{% endif %}"
)
LAYOUTS = {
    "ours": ({"id": "a", "category": "c", "text": "1 2"}, ("a", "c", [1, 2])),
    "Spec-Bench": ({"question_id": 81, "category": "c", "turns": ["1 2"]}, ("81", "c", [1, 2])),
    "MT-Bench": ({"question_id": 81, "category": "c", "turns": ["1 2", "3"], "reference": ["4"]}, ("81", "c", [1, 2])),
    "GSM8K": ({"question": "1 2", "answer": "3 #### 4"}, ("1", "gsm8k", [1, 2])),
    "HumanEval": ({"task_id": "H/0", "prompt": "1 2", "entry_point": "f", "test": "3"}, ("H/0", "humaneval", [1, 2])),
    "Alpaca": ({"instruction": "1", "input": "2", "output": "3"}, ("1", "alpaca", [1, 2])),
    "Alpaca without input": ({"instruction": "1 2", "input": ""}, ("1", "alpaca", [1, 2])),
    "prompt": ({"prompt": "1 2"}, ("1", "all", [1, 2])),
}


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def chat_tokenizer(target):
    """Return the target's tokenizer with a chat template."""
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_known_layout_is_read(target, tmp_path, layout):
    row, expected = LAYOUTS[layout]
    (prompt,) = load_eval_prompts(target.tokenizer, write_lines(tmp_path / "p.jsonl", [row]), limit=None)
    assert (prompt.id, prompt.category, prompt.ids) == expected
    assert (prompt.question, prompt.turn, prompt.text) == (prompt.id, 0, "1 2")


def test_a_chat_template_renders_questions_and_leaves_texts(chat_tokenizer, tmp_path):
    rows = [{"question": "1 2", "answer": "3"}, {"text": "1 2"}, {"messages": [{"role": "user", "content": "1 2"}]}]
    prompts = load_eval_prompts(chat_tokenizer, write_lines(tmp_path / "p.jsonl", rows), limit=None)
    assert sorted(p.ids for p in prompts) == [[1, 2], [58, 1, 2, 59], [58, 1, 2, 59]]


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_as_json_texts_are_messages(chat_tokenizer, tmp_path, column):
    texts = [json.dumps({"role": "user", "content": "1 2"})]
    (prompt,) = load_eval_prompts(chat_tokenizer, write_lines(tmp_path / "p.jsonl", [{column: texts}]), limit=None)
    assert prompt.messages == [{"role": "user", "content": "1 2"}]


def test_a_prompt_is_rendered_with_its_own_tools_and_arguments(chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = (
        "{{ tools | default([], true) | length }} {% if enable_thinking %}7 {% endif %}{{ messages[0].content }}"
    )
    rows = [
        {
            "messages": [{"role": "user", "content": "1"}],
            "template": {"enable_thinking": True},
            "tools": [{"a": 1}, {"b": 2}],
        },
        {"messages": [{"role": "user", "content": "1"}], "tools": ""},
    ]
    prompts = load_eval_prompts(chat_tokenizer, write_lines(tmp_path / "p.jsonl", rows), limit=None)
    assert [prompt.ids for prompt in prompts] == [[2, 7, 1], [0, 1]]
    unknown = write_lines(tmp_path / "unknown.jsonl", [rows[1] | {"tools": "not known"}])
    with pytest.raises(UserError, match=r"got tools that are not JSON at .*unknown.jsonl:1; change or remove it"):
        load_eval_prompts(chat_tokenizer, unknown, limit=None)


def test_arguments_of_the_template_are_those_of_a_row_before_the_others(chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = (
        "{% if enable_thinking %}7 {% endif %}{% if date %}{{ date }} {% endif %}{{ messages[0].content }}"
    )
    message = [{"role": "user", "content": "1"}]
    templates = [{"enable_thinking": False}, {"date": "8"}]
    rows = [{"question": "1"}, {"messages": message}, *({"messages": message, "template": t} for t in templates)]
    path = write_lines(tmp_path / "p.jsonl", rows)
    prompts = load_eval_prompts(chat_tokenizer, path, limit=None, template={"enable_thinking": True})
    assert [prompt.ids for prompt in prompts] == [[7, 1], [7, 1], [1], [7, 8, 1]]
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": "1"}, {"ids": [1]}])
    with pytest.raises(
        UserError, match=r"^evaluation.template: needs prompts that a chat template renders, got {'a': 1} for"
    ):
        load_eval_prompts(chat_tokenizer, texts, limit=None, template={"a": 1})


def test_a_dataset_written_to_disk_is_read_by_its_held_out_split(target, tmp_path):
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_dict({"text": [text]}) for name, text in [("train", "1"), ("test", "2")]}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    (prompt,) = load_eval_prompts(target.tokenizer, str(tmp_path / "saved"), limit=None)
    assert prompt.ids == [2]


def test_the_files_named_test_of_a_folder_are_read(tmp_path):
    for name, word in [("latest", "a"), ("test2-of-3", "b"), ("gsm8k_test", "c"), ("tests", "d")]:
        write_lines(tmp_path / f"{name}.jsonl", [{"text": word}])
    assert [row["text"] for row in read_prompt_rows(tmp_path)] == ["c", "b"]


def test_later_turns_follow_the_targets_own_answers(target, chat_tokenizer, tmp_path):
    rows = [
        {"question_id": 81, "category": "c", "turns": ["1", "2", "3"]},
        {"question_id": 82, "category": "c", "turns": ["4"]},
    ]
    file = write_lines(tmp_path / "p.jsonl", rows)
    expected = {
        target.tokenizer: [[1, 7, 8, 2], [1, 7, 8, 2, 9, 3]],
        chat_tokenizer: [[58, 1, 59, 7, 8, 58, 2, 59], [58, 1, 59, 7, 8, 58, 2, 59, 9, 58, 3, 59]],
    }
    for tokenizer, ids in expected.items():
        first = load_eval_prompts(tokenizer, file, limit=None)
        ends = [0, 6]
        second = build_next_turns(tokenizer, first, [[7, 8, 0], [7]], ends)
        assert build_next_turns(tokenizer, first, [[7, 8, 6], [7]], ends) == second
        third = build_next_turns(tokenizer, second, [[9]], ends)
        assert [(p.id, p.question, p.turn) for p in second + third] == [("81#2", "81", 1), ("81#3", "81", 2)]
        assert [p.ids for p in second + third] == ids
        assert build_next_turns(tokenizer, third, [[9]], ends) == []


def test_a_later_turn_follows_channels_as_a_server_renders_them(tmp_path):
    tokenizer = FAMILIES["harmony"].tokenizer("harmony")
    file = write_lines(tmp_path / "p.jsonl", [{"question_id": 81, "turns": ["17 * 23?", "Sure?"]}])
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 391.<|return|>"
    first, answer = load_eval_prompts(tokenizer, file, limit=None), tokenizer.encode(text)
    (second,) = build_next_turns(tokenizer, first, [answer], [answer[-1]])
    answered = {"role": "assistant", "content": "It is 391.", "thinking": "Hm."}
    served = [*first[0].messages, answered, {"role": "user", "content": "Sure?"}]
    assert second.ids == tokenizer.apply_chat_template(served, add_generation_prompt=True)["input_ids"]
    assert "<|channel|>final<|message|>It is 391.<|end|>" in tokenizer.decode(second.ids)


def test_the_fingerprint_is_that_of_the_first_turns_whatever_the_answers(target, tmp_path):
    rows = [{"question_id": 1, "turns": ["1", "2"]}]
    first = load_eval_prompts(target.tokenizer, write_lines(tmp_path / "p.jsonl", rows), limit=None)
    for answer in ([7, 8], [9]):
        prompts = first + build_next_turns(target.tokenizer, first, [answer], target.eos_ids)
        assert len(prompts) == 2
        assert fingerprint_prompts(prompts) == fingerprint_prompts(first)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "1 2"', "every line must be a JSON object, got {file}:2"),
        ('{"id": "x"}', "every line must have the columns of a known format, got id at {file}:2; "),
        ("[1, 2]", "every line must be a JSON object, got {file}:2"),
        ('{"text": 5}', "`text` must be a string, got 5 at {file}:2"),
        ('{"prompt": 5}', "`prompt` must be a string or a list of messages, each with"),
        ('{"question": 5, "answer": "6"}', "`question` must be a string, got 5 at {file}:2"),
        ('{"instruction": "1", "input": 5}', "`input` must be a string, got 5 at {file}:2"),
        ('{"messages": "hello"}', "`messages` must be a list of messages, each with `role` and"),
        ('{"question_id": 1, "turns": [1, 2]}', "`turns` must be a list of strings, got [1, 2] at {file}:2"),
    ],
)
def test_a_bad_line_of_prompts_is_named(target, tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "1 2"}\n' + line + "\n")
    for key in ("evaluation.prompts", "prompts"):
        with pytest.raises(UserError) as refused:
            load_eval_prompts(target.tokenizer, str(file), limit=None, key=key)
        assert str(refused.value).startswith(f"{key}: {message.format(file=file)}")
        assert f"{file}:2" in str(refused.value)
        assert "\n" not in str(refused.value)


USER, ASSISTANT = {"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "half \ud83d"}, "half of a surrogate pair"),
        ({"messages": [ASSISTANT]}, "no user turn"),
        ({"messages": [{**USER, "content": " "}]}, "an empty turn"),
        ({"question_id": 1, "turns": ["1", "\n"]}, "an empty turn"),
        ({"question_id": 1, "turns": []}, "no turn"),
        ({"messages": [{**USER, "role": "ghost"}]}, "an unknown role ('ghost')"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "content is not text"),
    ],
)
def test_a_prompt_that_training_would_leave_out_is_named(chat_tokenizer, tmp_path, row, reason):
    file = write_lines(tmp_path / "p.jsonl", [{"text": "1"}, row])
    with pytest.raises(UserError) as refused:
        read_prompt_rows(file, key="prompts")
    assert str(refused.value).startswith("prompts: every prompt must be one that the target can")
    assert reason in str(refused.value)
    assert f"{file}:2" in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([USER, ASSISTANT], [USER]),
        ([USER, ASSISTANT, USER, ASSISTANT], [USER, ASSISTANT, USER]),
        ([USER, ASSISTANT, {"role": "gpt", "content": ""}], [USER]),
        ([USER, {"role": "tool", "content": "5"}], [USER, {"role": "tool", "content": "5"}]),
    ],
)
def test_answers_at_the_end_of_a_prompt_are_left_out(tmp_path, caplog, messages, prompt):
    file = write_lines(tmp_path / "p.jsonl", [{"messages": messages}])
    with caplog.at_level(logging.INFO):
        ((row),) = read_prompt_rows(file)
        read_prompt_rows(file)  # first for a check, then for use
    assert row["messages"] == prompt
    count = caplog.text.count("1 prompts end in an answer, which is left out")
    assert count == (len(prompt) < len(messages))


def test_a_prompt_that_the_template_rejects_is_named(chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    file = write_lines(tmp_path / "p.jsonl", [{"id": "a", "messages": [USER]}])
    with pytest.raises(UserError, match=r"the chat template: no system role at id a;"):
        load_eval_prompts(chat_tokenizer, file, limit=None)


def test_a_prompt_of_a_token_without_an_embedding_is_named(chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = "{{ messages[0].content }}"
    for row in ({"text": "1 7"}, {"messages": [{**USER, "content": "7"}]}):
        file = write_lines(tmp_path / "p.jsonl", [{"text": "1"}, {**row, "id": "a"}])
        load_eval_prompts(chat_tokenizer, file, limit=None, vocab_size=8)
        with pytest.raises(UserError, match=r"token 7 has no embedding in the target .* at id a"):
            load_eval_prompts(chat_tokenizer, file, limit=None, vocab_size=7)


def test_a_null_id_counts_as_a_missing_id(tmp_path):
    rows = [{"id": None, "text": "1"}, {"id": None, "text": "2"}, {"id": 0, "text": "3"}]
    rows = read_prompt_rows(write_lines(tmp_path / "p.jsonl", rows))
    assert [row["id"] for row in rows] == ["1", "2", "0"]


def test_prompts_that_cannot_be_evaluated_are_refused(target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    for rows, message in [
        ([], "must hold at least one prompt"),
        ([{"text": "1"}, {"text": ""}], "every prompt needs a token, got none for id 2"),
        ([{"id": "a", "text": "1"}, {"id": "a", "text": "2"}], "every id must be unique, got a more"),
        ([{"question_id": "a", "turns": ["1", "2"]}, {"id": "a#2", "text": "2"}], "every id .*, got a#2 more"),
        ([{"messages": [{"role": "user", "content": "1"}]}], "needs a chat template for messages"),
        ([{"prompt": "1", "system": "2"}], "needs a chat template for system"),
    ]:
        write_lines(file, rows)
        with pytest.raises(UserError, match=rf"evaluation\.prompts: {message}"):
            load_eval_prompts(target.tokenizer, str(file), limit=None)


def test_missing_files_and_data_sets_are_refused_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for name in ("nowhere", "./no/where", "a/b.jsonl"):
        with pytest.raises(UserError, match=r"must be a readable JSONL file, got .*; `demo` "):
            read_prompt_rows(name)
    with pytest.raises(UserError, match="must be a dataset that can be loaded, got 'no/where'"):
        read_prompt_rows("no/where:a")
    with pytest.raises(UserError, match="must hold JSONL, JSON or Parquet files, got none in"):
        read_prompt_rows(tmp_path)


def test_prompts_are_read_unchanged_and_limited_by_category(target, tmp_path):
    rows = [{"id": 7, "category": "a", "text": "1 2"}, {"text": "3 4"}, {"category": "a", "text": "5"}]
    prompts = load_eval_prompts(target.tokenizer, write_lines(tmp_path / "p.jsonl", rows), limit=1)
    assert [(p.id, p.category, p.ids) for p in prompts] == [("7", "a", [1, 2]), ("2", "all", [3, 4])]
    assert prompts[0].row_id != prompts[1].row_id


def test_a_number_of_calibration_prompts_is_spread_over_the_categories_of_a_file(target, tmp_path):
    rows = [{"id": str(n), "text": "5 6 7", "category": "ab"[n >= 9]} for n in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = partial(load_calibration_prompts, target.tokenizer, str(tmp_path / "prompts.jsonl"))
    assert [prompt.id for prompt in load()] == [prompt.id for prompt in load(99)] == [str(n) for n in range(10)]
    assert [prompt.category for prompt in load(3)] == ["a", "a", "b"]
