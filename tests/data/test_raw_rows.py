"""Rows are read from every kind of file one by one; what cannot be read is named, not raised."""

import gzip
import json

import pytest

from data.sources import files
from data.sources.files import RawRow, open_rows
from models.errors import UserError

ROWS = [{"text": "a"}, {"text": "b"}, {"text": "c"}]


def read(path, **changes) -> list[RawRow]:
    return list(open_rows(str(path), key="mixture.sources.s.path", **changes))


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def table():
    import datasets

    return datasets.Dataset.from_list(ROWS)


def test_every_kind_of_source_holds_the_same_rows(tmp_path, table):
    import datasets

    (tmp_path / "p.jsonl").write_text(lines(ROWS))
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    (tmp_path / "p.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf\r\n" + json.dumps(ROWS, indent=1).encode())
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(json.dumps(ROWS, indent=1).encode()))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS).encode())
    table.to_parquet(tmp_path / "p.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "two")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train-0.jsonl").write_text(lines(ROWS[:2]))
    (folder / "train-1.jsonl").write_text(lines(ROWS[2:]))
    (folder / "test-0.jsonl").write_text(lines([{"text": "held out"}]))
    for name in (
        "p.jsonl",
        "p.jsonl.gz",
        "p.json",
        "p.json.gz",
        "bom.json",
        "bom.jsonl",
        "p.parquet",
        "saved",
        "two",
        "folder",
    ):
        assert [raw.row for raw in read(tmp_path / name)] == ROWS, name
    assert [raw.row for raw in read(tmp_path / "two", split="test")] == ROWS[:1]
    with pytest.raises(UserError, match=r"sources.s.split: must be one of train, test, got 'dev'"):
        read(tmp_path / "two", split="dev")


def test_broken_lines_are_named_by_place_and_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 64)
    file = tmp_path / "p.jsonl"
    file.write_bytes(
        b'{"text": "a"}\n\n{"text": \n{"text": "\xff"}\n[1]\n' + b'{"text": "' + b"x" * 200
        + b'"}\n' + b"[" * 60 + b'\n{"text": "b"}'
    )  # fmt: skip
    found = read(file)
    assert [raw.row for raw in found] == [{"text": "a"}, *[None] * 5, {"text": "b"}]
    assert [(raw.location, raw.reason) for raw in found if raw.row is None] == [
        (f"{file}:3", "a line that cannot be parsed as JSON"),
        (f"{file}:4", "a line that is not UTF-8"),
        (f"{file}:5", "a line that is not a JSON object"),
        (f"{file}:6", "a line that is too long"),
        (f"{file}:7", "a line that cannot be parsed as JSON"),
    ]


def test_a_line_nested_without_end_is_a_broken_line(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("[" * 100_000 + "\n" + lines(ROWS[:1]))
    assert [raw.row for raw in read(file)] == [None, ROWS[0]]


def test_of_a_table_only_the_row_with_an_impossible_date_is_lost(tmp_path):
    import pyarrow
    import pyarrow.parquet

    when = pyarrow.array([0, 10**18, 0], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"], "when": when}),
                                tmp_path / "p.parquet")  # fmt: skip
    found = read(tmp_path / "p.parquet")
    assert [raw.row and raw.row["text"] for raw in found] == ["a", None, "c"]
    assert found[1].reason == "a value that is out of range"


def test_of_a_table_only_the_row_that_is_not_utf8_is_lost(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "p.parquet")
    found = read(tmp_path / "p.parquet")
    assert [raw.row for raw in found] == [{"text": "a"}, None, {"text": "c"}]
    assert found[1].reason == "text that is not UTF-8"


def test_keys_that_tables_fill_with_null_are_gone(tmp_path):
    import datasets

    rows = [{"messages": [{"role": "user", "calls": [{"a": 1}]}]},
            {"messages": [{"role": "user", "calls": [{"b": 2}]}]}]  # fmt: skip
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "p.parquet")
    assert [raw.row for raw in read(tmp_path / "p.parquet")] == rows


@pytest.mark.parametrize("case", ["keys differ", "text or parts", "nulls"])
def test_json_columns_hold_what_was_written(tmp_path, case):
    import datasets

    column, rows = {
        "keys differ": (datasets.List(datasets.Json()), [[{"a": 1}], [{"b": "[2]"}, {"c": None}]]),
        "text or parts": (
            datasets.List({"content": datasets.Json()}),
            [[{"content": 'a "b"'}], [{"content": [{"text": "c"}]}]],
        ),
        "nulls": (datasets.Json(), [{"arguments": {"x": None}}, {"arguments": [1]}]),
    }[case]
    rows = [{"column": value} for value in rows]
    table = datasets.Dataset.from_list(rows, features=datasets.Features({"column": column}))
    table.to_parquet(tmp_path / "p.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in ("p.parquet", "saved"):
        assert [raw.row for raw in read(tmp_path / name)] == rows, name


def test_of_a_json_column_only_the_row_that_is_no_json_is_lost(tmp_path):
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.array(['{"a": 1}', "{no", None]).cast(pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"meta": column}), tmp_path / "p.parquet")
    found = read(tmp_path / "p.parquet")
    assert [raw.row for raw in found] == [{"meta": {"a": 1}}, None, {"meta": None}]
    assert found[1].reason == "a value that cannot be parsed as JSON"


def test_a_damaged_or_missing_file_is_one_line(tmp_path):
    whole = gzip.compress(lines(ROWS * 500).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "bad.json").write_text("[1, 2")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "cut.jsonl.gz": "must be a readable file, got .*cut.jsonl.gz",
        "bad.parquet": "must be a readable file, got .*bad.parquet",
        "bad.json": "must be a readable file, got .*bad.json",
        "none.jsonl": "must exist, got .*none.jsonl",
        "empty": "must be a dataset that can be loaded, got .*empty",
    }.items():
        with pytest.raises(UserError, match=f"mixture.sources.s.path: {message}") as refused:
            read(tmp_path / name)
        assert "\n" not in str(refused.value)
