"""`data.prepare` splits rows the same way in every run, and several workers write what a single one writes."""

import json
from collections import Counter

import pytest
from pyarrow import parquet

from data.config import DataConf, DataSource
from data.eval_prompts.prompts import read_prompt_rows as read_prompts
from data.prepare_config import SourceConf
from data.sources.prepared_rows import (
    METADATA_KEY,
    PreparedRow,
    RecordedDocument,
    SamplingInfo,
    read_prepared_rows,
    write_prepared_rows,
)
from data.sources.rows import Conversation, PlainText, TokenizedDocument
from data.sources.text_hashes import hash_first_question
from data.sources.training_rows import read_training_rows
from models.io.errors import UserError
from tests.support.data.preparing import asked, lines, prepare, report
from tests.support.reports.wandb_files import logged, run_ids


def test_held_out_rows_stay_held_out_when_data_is_added(tmp_path):
    lines(tmp_path / "a.jsonl", range(400))
    before = prepare(tmp_path, held_out=0.1, run="before", a="a.jsonl")
    lines(tmp_path / "a.jsonl", range(400, 700))
    lines(tmp_path / "b.jsonl", range(300), word="other")
    after = prepare(tmp_path, held_out=0.1, run="after", b="b.jsonl", a="a.jsonl")
    assert set(asked(before, "held_out")) < set(asked(after, "held_out"))
    assert set(asked(before)) < set(asked(after))
    assert 20 <= len(asked(before, "held_out")) <= 60
    assert not set(asked(after)) & set(asked(after, "held_out"))


def test_conversations_that_begin_alike_are_in_the_same_split(tmp_path):
    with (tmp_path / "a.jsonl").open("w") as opened:
        for n in range(120):
            turns = [("system", f"You are {n}."), ("user", f"Question {n % 20}"), ("assistant", "!")]
            messages = [{"role": role, "content": text} for role, text in turns]
            row = {"messages": messages, "template": {"enable_thinking": False}}
            opened.write(json.dumps(row) + "\n")
    out = prepare(tmp_path, held_out=0.5, a="a.jsonl")
    sides = [
        {(row.messages or [])[1]["content"] for row in read_prepared_rows(out, split)}
        for split in ("train", "held_out")
    ]
    assert min(map(len, sides)) > 2
    assert not set.intersection(*sides)
    prompts = read_prompts(out / "held_out.jsonl")  # as infer.eval reads them
    assert len(prompts) == report(out)["held_out"] == 6 * len(sides[1])
    assert [message["role"] for message in prompts[0]["messages"]] == ["system", "user"]
    assert prompts[0]["template"] == {"enable_thinking": False}


def test_the_counts_and_the_page_of_a_finished_folder_are_logged(tmp_path):
    lines(tmp_path / "a.jsonl", range(50))
    for worker in (0, 1):
        out = prepare(tmp_path, "log=wandb-offline", "workers=2", f"worker={worker}", held_out=0.2, a="a.jsonl")
        assert len(logged(out)) == worker  # written by the last worker
    ((_, project, name),) = run_ids(out)
    assert (project, name) == ("drafts", "run")
    (values,) = logged(out)
    for count in ("read", "train", "held_out", "dropped"):
        assert values[f"prepare_report/{count}"] == report(out)[count]
    assert values["prepare_report/table/nrows"] == 1
    assert values["prepare_report/page/_type"] == "html-file"
    prepare(tmp_path, "workers=2", held_out=0.2, a="a.jsonl")  # a finished folder may be opened without tracking


def test_several_workers_write_what_a_single_worker_writes(tmp_path):
    lines(tmp_path / "a.jsonl", range(100))
    lines(tmp_path / "a.jsonl", range(10))
    alone = prepare(tmp_path, held_out=0.2, run="alone", a="a.jsonl")
    for worker in (2, 0, 1):
        together = prepare(tmp_path, "workers=3", f"worker={worker}", held_out=0.2, run="together", a="a.jsonl")
        assert (together / "report.json").exists() == (worker == 1)  # written by the last worker
    assert len(list(together.glob("train-*-of-00003.parquet"))) == 3
    for split in ("train", "held_out"):
        assert asked(together, split) == asked(alone, split)
    assert report(together) == report(alone)
    assert report(alone)["dropped_by_reason"] == {"a duplicate": 10}


def test_a_worker_with_other_settings_is_refused_whichever_began(tmp_path):
    lines(tmp_path / "a.jsonl", range(100))
    prepare(tmp_path, "workers=2", "worker=1", held_out=0.0, a="a.jsonl")
    with pytest.raises(UserError, match=r"^mixture.held_out: must be 0.0 as in .*, got 0.5; choose another run_name"):
        prepare(tmp_path, "workers=2", "worker=0", held_out=0.5, a="a.jsonl")


def test_workers_without_a_row_write_empty_files(tmp_path):
    lines(tmp_path / "a.jsonl", range(2))
    for worker in range(4):
        out = prepare(tmp_path, "workers=4", f"worker={worker}", a="a.jsonl")
    assert (report(out)["train"], len(asked(out))) == (2, 2)
    assert len(list(out.glob("train-*-of-00004.parquet"))) == 4


def test_shares_are_exact_and_summed_up(tmp_path):
    lines(tmp_path / "a.jsonl", range(100))
    lines(tmp_path / "b.jsonl", range(100), word="other")
    out = prepare(
        tmp_path,
        rows=50,
        a=SourceConf(path="a.jsonl", share=0.8),
        b=SourceConf(path="b.jsonl", share=0.2, license="MIT"),
    )
    sources = report(out)["sources"]
    assert {name: counts["train"] + counts["held_out"] for name, counts in sources.items()} == {"a": 40, "b": 10}
    assert sources["b"]["dropped"] == {"beyond its share": 90}
    assert sources["b"]["licenses"] == {"MIT": 10}
    assert "| b |" in (out / "report.md").read_text()
    assert "MIT" in (out / "report.md").read_text()


def test_a_folder_of_an_earlier_version_is_refused_with_its_version(tmp_path):
    lines(tmp_path / "a.jsonl", range(4))
    out = prepare(tmp_path, a="a.jsonl")
    (file,) = out.glob("train-*.parquet")
    table = parquet.read_table(file)
    table = table.replace_schema_metadata(
        {METADATA_KEY: b'{"dropped": {}}'}  # as the first version wrote it
    )
    parquet.write_table(table, file)
    with pytest.raises(UserError) as refused:
        next(read_prepared_rows(out))
    assert str(refused.value) == (
        f"data.path: must be a folder of version 2, got version 1 in {file}; run `python -m data.prepare` again"
    )


def test_prompts_that_the_target_cannot_read_are_dropped(tmp_path):
    lines(tmp_path / "a.jsonl", range(10))
    lines(tmp_path / "a.jsonl", range(3), word="very " * 40)
    out = prepare(tmp_path, "target=demo", "mixture.max_prompt_tokens=30", a="a.jsonl")
    assert report(out)["dropped_by_reason"] == {"a prompt of more than 30 tokens": 3}


def test_training_learns_recorded_spans_or_else_the_rows_own_answers(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    drawn = SamplingInfo(
        turn=1, temperature=0.7, top_p=1.0, top_k=0, seed=1, finish_reason="stop", tokens=2, retokenized=False
    )
    labels_of_source = {"source": "s", "category": "c", "language": "en"}
    rows = [
        PreparedRow(
            id="1",
            messages=chat,
            documents=[RecordedDocument(ids=[5, 6, 7, 8], spans=[[1, 2], [3, 4]])],
            answers=[drawn],
            **labels_of_source,
        ),
        PreparedRow(id="2", messages=[*chat, chat[0]], tools=[{"a": 1}], template={"b": [2]}, **labels_of_source),
        PreparedRow(id="3", text="Once", **labels_of_source),
        PreparedRow(id="4", messages=chat[:1], **labels_of_source),
    ]
    write_prepared_rows(tmp_path / "train-00000-of-00001.parquet", rows, {})
    assert list(read_prepared_rows(tmp_path)) == rows
    assert list(read_prepared_rows(tmp_path, "train[:1]+train[-1:]")) == [rows[0], rows[-1]]
    conf = DataConf(source=DataSource.prepared, path=str(tmp_path))
    labels = {"category": "c", "language": "en"}
    skipped = Counter()
    assert list(read_training_rows(conf, skipped)) == [
        TokenizedDocument(
            ids=[5, 6, 7, 8],
            answer=[False, True, False, True],
            conversation=0,
            first_question=hash_first_question(chat),
            **labels,
        ),
        Conversation(messages=chat, tools=[{"a": 1}], template={"b": [2]}, conversation=1, **labels),
        PlainText(text="Once", **labels),
    ]
    assert skipped == {"no assistant turn": 1}
    with pytest.raises(UserError, match=r"data.path: must be a folder written by data.prepare"):
        list(read_training_rows(DataConf(source=DataSource.prepared, path=str(tmp_path / "none")), skipped))
