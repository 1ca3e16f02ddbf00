"""`data.prepare` refuses in one line, early, and leaves nothing that hinders the next command."""

import gzip

import pytest

from conf.entry import USER_ERRORS, compose, error_to_line
from data.prepare_config import PrepareConf, SourceConf
from models.io.errors import UserError
from tests.support.data.preparing import lines, prepare, report


def test_a_finished_folder_stays_unchanged_and_other_settings_are_refused(tmp_path):
    lines(tmp_path / "a.jsonl", range(20))
    out = prepare(tmp_path, a="a.jsonl")
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    prepare(tmp_path, a="a.jsonl")
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    with pytest.raises(UserError, match=r"mixture.held_out: must be 0.01 as in .*run, got 0.5; "):
        prepare(tmp_path, held_out=0.5, a="a.jsonl")


def test_the_remedy_of_an_error_works_under_the_same_name(tmp_path):
    """After a refusal that comes once the sources are read, the folder has the worker's lock file alone."""
    lines(tmp_path / "a.jsonl", range(30))
    source = SourceConf(path="a.jsonl", share=1.0)
    for _ in range(2):
        with pytest.raises(UserError, match=r"set mixture.rows=30 or null"):
            prepare(tmp_path, rows=40, a=source)
        assert [*(tmp_path / "outputs" / "run").iterdir()] == [tmp_path / "outputs/run/lock-00000"]
    assert report(prepare(tmp_path, rows=30, a=source))["read"] == 30


def test_a_truncated_source_can_be_replaced(tmp_path):
    lines(tmp_path / "a.jsonl", range(300))
    compressed = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "b.jsonl.gz").write_bytes(compressed[:-99])
    with pytest.raises(UserError, match=r"mixture.sources.b.path: must be a readable file, got .*"):
        prepare(tmp_path, a="a.jsonl", b="b.jsonl.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(compressed)
    out = prepare(tmp_path, a="a.jsonl", b="b.jsonl.gz")
    assert report(out)["dropped_by_reason"] == {"a duplicate": 300}


def test_missing_columns_are_printed(tmp_path, capsys):
    lines(tmp_path / "a.jsonl", range(3))
    columns = {"conversations": "conversations", "category": "topc"}
    prepare(tmp_path, a=SourceConf(path="a.jsonl", columns=columns))
    output = capsys.readouterr().out
    assert "mixture.sources.a.columns: none of the first rows has topc" in output


def test_texts_of_the_data_stay_in_their_line_of_the_page(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"a\\nb|\\ud800": 1}\n')
    out = prepare(tmp_path, a=SourceConf(path="a.jsonl", license="MIT\nor | else"))
    page = (out / "report.md").read_text()
    assert r"a.jsonl:2 (the row has a b\|\ud800) |" in page
    assert r"| MIT or \| else |" in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"caption": "x", "url": "y"}\n', r"sources.a.columns: .* got columns caption, url in"),
        ('{"a\\nb": 1}\n', r"sources.a.columns: .* got columns a b in"),
        (
            "text,id\nHi,1\n",
            r"sources.a.path: must hold rows that can be read, got a line that "
            r"cannot be parsed as JSON at .*a.jsonl:1 .*; give JSON lines, a JSON",
        ),
        ("", r"sources.a.path: must hold rows that can be read, got none in .*a.jsonl"),
        (
            '{"text": " "}\n' * 3,
            r"sources.a: must hold a row that can be used, got 3 rows read, "
            r"0 can be used; 3 an empty turn; remove it",
        ),
    ],
)
def test_a_source_without_a_row_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        prepare(tmp_path, a="a.jsonl")
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "outputs").rglob("*.*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["workers=0"], "worker: must lie in"),
        (["worker=1"], r"worker: must lie in 0..0 of workers=1, got 1"),
        (["mixture.max_prompt_tokens=5"], "mixture.max_prompt_tokens: must be null without a targ"),
        (["mixture.exclude=[nowhere]"], "mixture.exclude: must be a readable JSONL file"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, changes, message):
    lines(tmp_path / "a.jsonl", range(5))
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, *changes, a="a.jsonl")
    assert not (tmp_path / "outputs").exists()


def test_a_missing_shard_is_refused(tmp_path):
    (tmp_path / "rows").mkdir()
    lines(tmp_path / "rows" / "train-0.jsonl", range(5))
    (tmp_path / "rows" / "train-1.jsonl").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"mixture.sources.a.path: must be a readable.*train-1"):
        prepare(tmp_path, a="rows")
    with pytest.raises(UserError, match=r"mixture.sources.b.path: must exist, got .*nowhere"):
        prepare(tmp_path, b="nowhere.jsonl")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["mixture=one"], "mixture.sources.rows.path: must be set, got nothing; add mixture.sources.rows.path=VALUE"),
        (
            ["mixture=one", "mixture.sources.rows=a.jsonl"],
            "mixture.sources.rows: must be keys with values, got a.jsonl",
        ),
        (["mixture.sources=[a]"], "config: must have keys, got a list; write NAME: VALUE in place of - VALUE"),
    ],
)
def test_a_manifest_of_the_wrong_form_is_refused_with_its_key(changes, message):
    with pytest.raises(USER_ERRORS) as refused:
        compose("prepare", PrepareConf, changes)
    assert error_to_line(refused.value) == message
