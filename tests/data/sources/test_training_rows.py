"""Rows of every format become documents; rows that do not fit are counted or refused, never lost."""

import json
import logging
from collections import Counter
from dataclasses import replace

import huggingface_hub.constants
import pytest

from data.config import DataConf, DataSource, DemoConf, RowFormat, TurnSelection
from data.sources.open_rows import check_hub_dataset
from data.sources.rows import Conversation, PlainText, TokenizedDocument
from data.sources.training_rows import check_data_exists, read_training_rows
from models.io.errors import UserError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": SPEAKERS[m["role"]], "value": m["content"]} for m in MESSAGES]


def write_jsonl(tmp_path, *lines, **changes) -> DataConf:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return DataConf(source=DataSource.jsonl, path=str(path), **changes)


def read_rows(conf: DataConf) -> tuple[list, Counter[str]]:
    """Read rows without their numbers, which tests/data/eval_prompts/test_hold_out.py checks."""
    skipped: Counter[str] = Counter()
    return [replace(row, conversation=None) for row in read_training_rows(conf, skipped)], skipped


def test_an_answer_beside_its_prompt_is_text_or_messages(tmp_path):
    prompt, completion = MESSAGES[:-1], MESSAGES[-1:]
    conf = write_jsonl(
        tmp_path,
        {"prompt": prompt, "completion": completion},
        {"prompt": prompt, "completion": json.dumps(completion)},
        {"prompt": prompt, "response": completion[0]["content"]},
        {"prompt": MESSAGES, "completion": []},
        {"prompt": "Bye", "completion": completion},
        {"prompt": "Bye", "completion": "So long"},
        format=RowFormat.prompt,
    )
    messages = [row.messages for row in read_rows(conf)[0]]
    assert messages == [MESSAGES] * 4 + [MESSAGES[3:]] * 2
    conf = write_jsonl(tmp_path, {"messages": prompt, "response": "So long"}, {"messages": MESSAGES, "response": "No."})
    assert [row.messages for row in read_rows(conf)[0]] == [MESSAGES] * 2


def test_an_answer_or_a_text_may_be_json(tmp_path):
    rows = [
        {"instruction": "Two fruits, as JSON.", "output": '["apple", "banana"]'},
        {"question": "One?", "answer": '[{"a": 1}]'},
    ]
    answers = [row.messages[-1]["content"] for row in read_rows(write_jsonl(tmp_path, *rows))[0]]
    assert answers == [rows[0]["output"], rows[1]["answer"]]
    conf = write_jsonl(tmp_path, {"text": json.dumps(MESSAGES)}, column="text")
    assert read_rows(conf) == ([Conversation(messages=MESSAGES)], Counter())
    for column, form in {"text": RowFormat.auto, "body": RowFormat.text}.items():
        for text in ('["a", "b"]', '[{"a": 1}]', "[{}]"):
            conf = write_jsonl(tmp_path, {column: text}, column=column, format=form)
            assert read_rows(conf) == ([PlainText(text=text)], Counter())


def test_a_list_that_a_table_leaves_empty_hides_no_prompt(tmp_path):
    row = {"messages": [], "prompt": "Hi", "completion": "Hello"}
    (conversation,), dropped = read_rows(write_jsonl(tmp_path, row))
    assert ([message["content"] for message in conversation.messages], dropped) == (["Hi", "Hello"], Counter())


@pytest.mark.parametrize("column", ["ids", "data"])
def test_texts_beside_a_question_are_no_conversation(tmp_path, column):
    conf = write_jsonl(tmp_path, {"question": "What?", "answer": "This", column: ["a1", "a2"]})
    ((row,), skipped) = read_rows(conf)
    assert [message["content"] for message in row.messages] == ["What?", "This"]
    assert not skipped


def test_every_format_is_detected_from_the_row(tmp_path):
    conf = write_jsonl(
        tmp_path,
        {"messages": MESSAGES},
        {"conversations": SHAREGPT},
        "",
        {"text": "once"},
        {"ids": [1, 2, 3], "answer": [0, 1, 1]},
    )
    conversation = Conversation(messages=MESSAGES)
    tokens = TokenizedDocument(ids=[1, 2, 3], answer=[False, True, True])
    assert read_rows(conf) == ([conversation, conversation, PlainText(text="once"), tokens], Counter())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": list(map(json.dumps, MESSAGES))},
        {"conversations": list(map(json.dumps, SHAREGPT))},
        {"messages": json.dumps(list(map(json.dumps, MESSAGES)))},
        {"data": json.dumps(SHAREGPT)},
    ],
)
def test_messages_as_json_texts_are_messages(tmp_path, row):
    assert read_rows(write_jsonl(tmp_path, row)) == ([Conversation(messages=MESSAGES)], Counter())


def test_a_text_beside_messages_as_json_texts_is_counted(tmp_path):
    texts = list(map(json.dumps, MESSAGES))
    good, bad = {"messages": texts}, {"messages": [*texts[:2], "Hello"]}
    rows, skipped = read_rows(write_jsonl(tmp_path, good, bad))
    assert (len(rows), skipped) == (1, Counter({"a message that is not an object": 1}))


def test_turns_that_happen_to_be_json_stay_turns(tmp_path):
    turns = ['{"name": "Ada"}', '{"born": 1815}']
    (row,), _ = read_rows(write_jsonl(tmp_path, {"data": turns}))
    assert [message["content"] for message in row.messages] == turns


def test_rows_of_another_format_than_the_configured_one_are_counted(tmp_path):
    conf = write_jsonl(tmp_path, {"chat": MESSAGES}, {"chat": "x"}, format=RowFormat.messages, column="chat")
    assert read_rows(conf) == ([Conversation(messages=MESSAGES)], Counter({"column chat has the format text": 1}))


def test_rows_that_do_not_fit_are_counted_by_reason(tmp_path):
    user, assistant = MESSAGES[1:3]
    conf = write_jsonl(
        tmp_path,
        {"messages": MESSAGES},
        {"messages": [user]},
        {"messages": [user, {"role": "assistant", "content": ""}, user, assistant]},
        {"messages": [user | {"content": " \n"}, assistant]},
        {"messages": [user, {"role": "assistant", "content": [{"type": "image"}]}]},
        {"conversations": [{"from": "ghost", "value": "boo"}]},
        {"ids": [1, 2], "answer": [True]},
        {"prompt": "x"},
        {"query": "x"},
        {"text": 5},
        {"messages": 5},
        {"messages": [5.5]},
        {"messages": [user, "x"]},
    )
    documents, skipped = read_rows(conf)
    assert len(documents) == 1
    assert skipped == {
        "no assistant turn": 2,
        "an empty turn": 2,
        "a message whose content is not text": 1,
        "an unknown role": 1,
        "ids without an answer flag for each": 1,
        "no messages, text or prompt": 1,
        "a prompt that is not text": 2,
        "column messages holds no messages, turns, text or token ids": 1,
        "a message that is not an object": 1,
    }


@pytest.mark.parametrize("system", [0, 1])
def test_an_answer_before_the_first_question_is_left_out_and_counted(tmp_path, caplog, system):
    early = [*MESSAGES[:system], MESSAGES[2], *MESSAGES[1:]]
    conf = write_jsonl(tmp_path, {"messages": early}, {"messages": MESSAGES})
    with caplog.at_level(logging.INFO):
        rows, skipped = read_rows(conf)
        read_rows(conf)  # again, as after a preview
    assert [row.messages for row in rows] == [[*MESSAGES[:system], *MESSAGES[1:]], MESSAGES]
    assert not skipped
    assert caplog.text.count("1 rows begin with an answer, which is left out") == 1


def test_tools_and_arguments_of_the_template_come_with_the_row(tmp_path):
    function = {"name": "add", "arguments": {"a": 1, "b": None}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    as_text = {"function": function | {"arguments": json.dumps(function["arguments"])}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    user = MESSAGES[1]
    row = {"messages": [user, called], "tools": tools, "template": {"enable_thinking": False}}
    texts = {
        "messages": [user, called | {"tool_calls": [as_text]}],
        "tools": json.dumps(tools),
        "template": json.dumps(row["template"]),
        "category": "tools",
        "language": "en",
    }
    plain, labeled = read_rows(write_jsonl(tmp_path, row, texts))[0]
    assert plain == Conversation(messages=[user, called], tools=tools, template=row["template"])
    assert labeled == replace(plain, category="tools", language="en")
    bad = [{**row, "tools": "{"}, {**row, "tools": {"a": 1}}, {**row, "template": [1]}]
    assert read_rows(write_jsonl(tmp_path, row, *bad))[1].total() == 3


def test_the_limit_counts_rows(tmp_path):
    conf = write_jsonl(tmp_path, {"text": "a"}, {"text": "b"}, {"text": "c"}, limit=2)
    assert read_rows(conf)[0] == [PlainText(text="a"), PlainText(text="b")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"text": '], r"every line must be a JSON object, .* at .*rows.jsonl:2;"),
        (["[1, 2]"], r"got a list at .*rows.jsonl:1; fix or remove"),
        (['{"query": "a"}'], r"data.format: some row must have the format auto, got none .*query"),
        (
            ['{"prompt": "a"}', '{"messages": [{"role": "user", "content": "b"}]}'],
            r"data.path: some row must have an answer, got none in .*; data.prepare has the target",
        ),
        ([], r"data.path: must hold rows, got none in .*; check the path"),
    ],
)
def test_unreadable_jsonl_is_refused(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        read_rows(write_jsonl(tmp_path, *lines))


def test_a_check_needs_no_model_and_finds_a_missing_file(tmp_path):
    check_data_exists(DataConf())
    with pytest.raises(UserError, match=r"data.path: must be set for data.source=jsonl, got null"):
        check_data_exists(DataConf(source=DataSource.jsonl))
    check_data_exists(write_jsonl(tmp_path, {"text": "a"}))
    with pytest.raises(UserError, match=r"data.path: must be a JSONL file, got .*none.jsonl"):
        check_data_exists(DataConf(source=DataSource.jsonl, path=str(tmp_path / "none.jsonl")))


@pytest.fixture
def table(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets.Dataset.from_list([{"messages": MESSAGES}, {"messages": MESSAGES[1:3]}])


def build_dataset_conf(path, **changes) -> DataConf:
    return DataConf(source=DataSource.dataset, path=str(path), **changes)


def test_training_reads_the_configured_slice(tmp_path):
    lines = [{"text": letter} for letter in "abcd"]
    conf = write_jsonl(tmp_path, *lines, split="train[:1]+train[-1:]")
    for source in (DataSource.jsonl, DataSource.dataset):
        conf = replace(conf, source=source)
        assert [row.text for row in read_rows(conf)[0]] == ["a", "d"]


@pytest.mark.parametrize("offline", [True, pytest.param(False, marks=pytest.mark.system)])
def test_an_unreachable_hub_name_says_how_to_use_a_local_path(table, monkeypatch, offline):
    import datasets

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    check_hub_dataset.cache_clear()  # the other case has asked
    with pytest.raises(UserError, match=r"nobody/nothing.*without a network give a local path"):
        check_data_exists(build_dataset_conf("nobody/nothing"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: DataConf(split="train[1:]"),
            r"data.split: must be a name for data.source=demo, .*, got train\[1:\]; data.demo.num_prompts takes",
        ),
        (
            lambda: DataConf(limit=5),
            "data.limit: must keep its default for data.source=demo, which does not read it, got 5; data.demo.num_pro",
        ),
        (
            lambda: DataConf(source=DataSource.captured, path="x", turns=TurnSelection.last, template={"a": 1}),
            "data.turns: must keep its default for data.source=captured, .*; data.template: must keep its default",
        ),
        (
            lambda: DataConf(source=DataSource.prepared, path="x", format=RowFormat.text),
            "data.format: must keep its default for data.source=prepared, .*; leave it out",
        ),
        (
            lambda: DataConf(source=DataSource.jsonl, path="x", subset="en"),
            "data.subset: must keep its default for data.source=jsonl, .*; leave it out",
        ),
        (lambda: DataConf(path="x"), "data.path: must be null for data.source=demo, got x; add data=jsonl"),
        (lambda: DataConf(row_length=4, limit=0), r"data.row_length: .*; data.limit: "),
        (
            lambda: DemoConf(temperature=-1.0),
            "data.demo.temperature: must be 0, or finite and at least 1e-5, got -1.0; 0 takes the likeliest token",
        ),
    ],
)
def test_a_conf_that_cannot_work_is_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_damaged_prepared_files_are_refused_in_one_line(tmp_path):
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"^data.path: must hold intact Parquet files, got .*; copy it again, or"):
        read_rows(DataConf(source=DataSource.prepared, path=str(tmp_path)))


def test_a_name_that_no_hub_takes_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"^data.path: must be a reachable hub name, got 'my data'"):
        check_hub_dataset("my data", "data.path")
