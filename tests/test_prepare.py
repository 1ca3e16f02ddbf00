"""`data.prepare` as a command: what moves, what is refused, and what several workers make of it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from conf.entry import compose
from data.config import DataConf, Source
from data.conversations import Conversation, Text, Tokenised
from data.mixture import SourceConf
from data.prepare import PrepareConf, main
from data.prepared import Drawn, Row, Spans, read, write
from data.prompts import read as read_prompts
from data.sources import rows
from models.errors import UserError


def lines(file: Path, numbers: range, word: str = "question") -> None:
    """Questions with answers, as ShareGPT has them."""
    with file.open("a") as opened:
        for n in numbers:
            turns = [{"from": "human", "value": f"{word} {n}"}, {"from": "gpt", "value": f"{n}!"}]
            opened.write(json.dumps({"id": n, "conversations": turns}) + "\n")


def prepare(
    folder: Path, *changes: str, run: str = "run", rows: int | None = None, held_out: float = 0.01,
    **sources: str | SourceConf,
) -> Path:  # fmt: skip
    """Run the command over files of the folder."""
    base = compose(
        "prepare", PrepareConf, ["mixture=one", "mixture.sources.rows.path=unread", *changes]
    )
    found = {
        name: replace(source, path=str(folder / source.path))
        for name, source in sources.items()
        for source in [SourceConf(path=source) if isinstance(source, str) else source]
    }
    mixture = replace(base.mixture, sources=found, rows=rows, held_out=held_out)
    if mixture.exclude == ["demo"]:
        mixture.exclude = []  # reading the demo's takes seconds
    conf = replace(base, mixture=mixture, run_name=run, output_dir=str(folder / "outputs"))
    main.__wrapped__(conf)
    return folder / "outputs" / run


def asked(folder: Path, split: str = "train") -> list[str]:
    return [(row.messages or [{"content": row.text}])[0]["content"] for row in read(folder, split)]


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_what_is_held_out_never_moves_when_data_is_added(tmp_path):
    lines(tmp_path / "a.jsonl", range(400))
    before = prepare(tmp_path, held_out=0.1, run="before", a="a.jsonl")
    lines(tmp_path / "a.jsonl", range(400, 700))
    lines(tmp_path / "b.jsonl", range(300), word="other")
    after = prepare(tmp_path, held_out=0.1, run="after", b="b.jsonl", a="a.jsonl")
    assert set(asked(before, "held_out")) < set(asked(after, "held_out"))
    assert set(asked(before)) < set(asked(after))
    assert 20 <= len(asked(before, "held_out")) <= 60
    assert not set(asked(after)) & set(asked(after, "held_out"))


def test_conversations_that_begin_alike_are_on_one_side(tmp_path):
    with (tmp_path / "a.jsonl").open("w") as opened:
        for n in range(120):
            turns = [
                ("system", f"You are {n}."),
                ("user", f"Question {n % 20}"),
                ("assistant", "!"),
            ]
            messages = [{"role": role, "content": text} for role, text in turns]
            row = {"messages": messages, "template": {"enable_thinking": False}}
            opened.write(json.dumps(row) + "\n")
    out = prepare(tmp_path, held_out=0.5, a="a.jsonl")
    sides = [
        {(row.messages or [])[1]["content"] for row in read(out, split)}
        for split in ("train", "held_out")
    ]
    assert min(map(len, sides)) > 2
    assert not set.intersection(*sides)
    prompts = read_prompts(out / "held_out.jsonl")  # as infer.eval reads them
    assert len(prompts) == report(out)["held_out"] == 6 * len(sides[1])
    assert [message["role"] for message in prompts[0]["messages"]] == ["system", "user"]
    assert prompts[0]["template"] == {"enable_thinking": False}


def test_several_workers_write_what_one_writes(tmp_path):
    lines(tmp_path / "a.jsonl", range(100))
    lines(tmp_path / "a.jsonl", range(10))
    alone = prepare(tmp_path, held_out=0.2, run="alone", a="a.jsonl")
    for worker in (2, 0, 1):
        together = prepare(
            tmp_path, "workers=3", f"worker={worker}", held_out=0.2, run="together", a="a.jsonl"
        )  # fmt: skip
        assert (together / "report.json").exists() == (worker == 1)  # the last one
    for split in ("train", "held_out"):
        shards = sorted(together.glob(f"{split}-*-of-00003.parquet"))
        assert len(shards) == 3
        assert asked(together, split) == asked(alone, split)
    assert report(together) == report(alone)
    assert report(alone)["dropped_by_reason"] == {"a duplicate": 10}
    assert not (together / "work").exists()


def test_shares_are_exact_and_summed_up(tmp_path):
    lines(tmp_path / "a.jsonl", range(100))
    lines(tmp_path / "b.jsonl", range(100), word="other")
    out = prepare(
        tmp_path, rows=50, a=SourceConf(path="a.jsonl", share=0.8),
        b=SourceConf(path="b.jsonl", share=0.2, licence="MIT"),
    )  # fmt: skip
    found = report(out)["sources"]
    assert {name: one["train"] + one["held_out"] for name, one in found.items()} == {
        "a": 40, "b": 10,
    }  # fmt: skip
    assert found["b"]["dropped"] == {"beyond its share": 90}
    assert found["b"]["licences"] == {"MIT": 10}
    assert "| b |" in (out / "report.md").read_text()
    assert "MIT" in (out / "report.md").read_text()


def test_the_same_command_goes_on_and_another_is_refused(tmp_path, caplog):
    lines(tmp_path / "a.jsonl", range(20))
    out = prepare(tmp_path, a="a.jsonl")
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    prepare(tmp_path, a="a.jsonl")
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    with pytest.raises(UserError, match=r"mixture.held_out: must be 0.01 as in .*run, got 0.5; "):
        prepare(tmp_path, held_out=0.5, a="a.jsonl")
    lines(tmp_path / "a.jsonl", range(20, 30))
    with pytest.raises(UserError, match=r"mixture.sources.a.path: a.jsonl: must be \d+ bytes"):
        prepare(tmp_path, a="a.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"caption": "x", "url": "y"}\n', r"sources.a.columns: .* got columns caption, url in"),
        ("{\n[\n", r"sources.a.columns: must say .* got 2 rows, none whole"),
        ("", r"sources.a.columns: must say .* got 0 rows"),
        ('{"text": " "}\n' * 3, r"sources.a: must hold a row that can be used, got 3 rows read, "
                                r"0 can be used; 3 an empty turn; remove the source"),
    ],
)  # fmt: skip
def test_a_source_without_a_row_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        prepare(tmp_path, a="a.jsonl")
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "outputs").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["workers=0"], "worker: must lie in"),
        (["worker=1"], r"worker: must lie in 0..0 of workers=1, got 1"),
        (["mixture.max_prompt_tokens=5"], "mixture.max_prompt_tokens: must be null without a targ"),
        ([], "mixture.sources.b.path: must exist, got .*nowhere"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, changes, message):
    lines(tmp_path / "a.jsonl", range(5))
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, *changes, a="a.jsonl", b="nowhere.jsonl")
    with pytest.raises(UserError, match=r"mixture.exclude: must be a readable JSONL file"):
        prepare(tmp_path, "mixture.exclude=[nowhere]", a="a.jsonl")
    assert not (tmp_path / "outputs").exists()


def test_prompts_that_the_target_cannot_read_are_dropped(tmp_path):
    lines(tmp_path / "a.jsonl", range(10))
    lines(tmp_path / "a.jsonl", range(3), word="very " * 40)
    out = prepare(tmp_path, "target=demo", "mixture.max_prompt_tokens=30", a="a.jsonl")
    assert report(out)["dropped_by_reason"] == {"a prompt of more than 30 tokens": 3}


def test_training_learns_recorded_spans_else_the_rows_own_answers(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    drawn = Drawn(turn=1, temperature=0.7, top_p=1.0, top_k=0, seed=1, finish_reason="stop",
                  tokens=2, retokenised=False)  # fmt: skip
    told = {"source": "s", "category": "c", "language": "en"}
    kept = [
        Row(id="1", messages=chat, documents=[Spans(ids=[5, 6, 7, 8], spans=[[1, 2], [3, 4]])],
            answers=[drawn], **told),
        Row(id="2", messages=[*chat, chat[0]], tools=[{"a": 1}], template={"b": [2]}, **told),
        Row(id="3", text="Once", **told),
        Row(id="4", messages=chat[:1], **told),
    ]  # fmt: skip
    write(tmp_path / "train-00000-of-00001.parquet", kept, dict)
    assert list(read(tmp_path)) == kept
    conf = DataConf(source=Source.prepared, path=str(tmp_path))
    labels = {"category": "c", "language": "en"}
    skipped = Counter()
    assert list(rows(conf, skipped)) == [
        Tokenised(ids=[5, 6, 7, 8], answer=[False, True, False, True], **labels),
        Conversation(messages=chat, tools=[{"a": 1}], template={"b": [2]}, **labels),
        Text(text="Once", **labels),
    ]
    assert skipped == {"no assistant turn": 1}
    with pytest.raises(UserError, match=r"data.path: must be a folder written by data.prepare"):
        list(rows(DataConf(source=Source.prepared, path=str(tmp_path / "none")), skipped))
