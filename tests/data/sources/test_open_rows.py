"""Rows are read from every kind of file one by one; a row that cannot be read is named, not raised."""

import gzip
import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from data.sources.files import RawRow
from data.sources.open_rows import list_source_files, open_rows
from models.io.errors import UserError

ROWS = [{"text": "a"}, {"text": "b"}, {"text": "c"}]


def read_rows(path, **changes) -> list[RawRow]:
    return list(open_rows(str(path), key="mixture.sources.s.path", **changes))


def format_lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def table():
    import datasets

    return datasets.Dataset.from_list(ROWS)


def test_every_kind_of_source_holds_the_same_rows(tmp_path, table):
    import datasets

    (tmp_path / "p.jsonl").write_text(format_lines(ROWS))
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(format_lines(ROWS).encode()))
    (tmp_path / "p.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf\r\n" + json.dumps(ROWS, indent=1).encode())
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(json.dumps(ROWS, indent=1).encode()))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + format_lines(ROWS).encode())
    table.to_parquet(tmp_path / "p.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "two")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train-0.jsonl").write_text(format_lines(ROWS[:2]))
    (folder / "train-1.jsonl").write_text(format_lines(ROWS[2:]))
    (folder / "test-0.jsonl").write_text(format_lines([{"text": "held out"}]))
    for name in "p.jsonl p.jsonl.gz p.json p.json.gz bom.json bom.jsonl p.parquet saved two folder".split():
        assert [raw.row for raw in read_rows(tmp_path / name)] == ROWS, name
    assert [raw.row for raw in read_rows(tmp_path / "two", split="test")] == ROWS[:1]
    with pytest.raises(UserError, match=r"sources.s.split: must be one of train, test, got 'dev'"):
        read_rows(tmp_path / "two", split="dev")


SLICES = {
    "train[1:]": [1, 2],
    "train[:67%]": [0, 1],
    "train[-1:]": [2],
    "train[:1]+train[2:]": [0, 2],
    "train[1:]+test": [1, 2, 0],
    "train[9:]": [],
}


@pytest.mark.parametrize("split", SLICES)
@pytest.mark.parametrize("form", ["files", "saved splits", "arrays"])
def test_a_slice_means_the_same_for_every_source(tmp_path, table, form, split):
    import datasets

    path = tmp_path / "data"
    if form == "saved splits":
        datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(path)
    else:
        path.mkdir()
        for name, rows in {"train-0": ROWS[:2], "train-1": ROWS[2:], "test-0": ROWS[:1]}.items():
            text = json.dumps(rows, indent=1) if form == "arrays" else format_lines(rows)
            (path / f"{name}.jsonl").write_text(text)
    assert [raw.row for raw in read_rows(path, split=split)] == [ROWS[n] for n in SLICES[split]]


@pytest.mark.parametrize("form", ["p.jsonl", "p.json", "p.parquet", "saved", "saved.arrow"])
def test_a_slice_of_the_only_split_needs_no_name(tmp_path, table, form, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / form
    if form == "p.parquet":
        table.to_parquet(path)
    elif form.startswith("saved"):
        table.save_to_disk(tmp_path / "saved")
        path = path if path.is_dir() else next((tmp_path / "saved").glob("*.arrow"))
    else:
        path.write_text(format_lines(ROWS) if form == "p.jsonl" else json.dumps(ROWS))
    assert [raw.row for raw in read_rows(path, split="train_sft[1:]")] == ROWS[1:]


@pytest.mark.parametrize("split", ["2024", "train", "train[1:]"])
def test_the_only_split_may_be_called_by_a_number(tmp_path, table, split):
    import datasets

    datasets.DatasetDict({"2024": table}).save_to_disk(tmp_path / "saved")
    rows = [raw.row for raw in read_rows(tmp_path / "saved", split=split)]
    assert rows == ROWS[1 if "[" in split else 0 :]


@pytest.mark.parametrize("form", ["p.jsonl", "saved"])
@pytest.mark.parametrize("split", ["train[1]", "train[a:]", "train[1:2:3]"])
def test_a_split_that_cannot_be_parsed_is_refused(tmp_path, table, form, split):
    (tmp_path / "p.jsonl").write_text(format_lines(ROWS))
    table.save_to_disk(tmp_path / "saved")
    message = r"mixture.sources.s.split: must be a name, or slices such as train\[1000:\]"
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / form, split=split)


@pytest.mark.parametrize("form", ["p.jsonl", "saved"])
def test_the_only_split_is_not_read_twice_under_two_names(tmp_path, table, form):
    (tmp_path / "p.jsonl").write_text(format_lines(ROWS))
    table.save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"mixture.sources.s.split: must .*, got 'train\+test'"):
        read_rows(tmp_path / form, split="train+test")


def test_files_of_other_splits_are_not_read_in_place_of_the_named_split(tmp_path):
    for name in ("train-0", "test-0"):
        (tmp_path / f"{name}.jsonl").write_text(format_lines(ROWS))
    with pytest.raises(UserError, match=r"s.split: must be one of train, test, got 'train_sft'"):
        read_rows(tmp_path, split="train_sft")


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (["part-0.jsonl", "part-1.jsonl", "test.jsonl"], ["part-0.jsonl", "part-1.jsonl"]),
        (["chat.jsonl", "dataset_infos.json", "chat-validation.jsonl"], ["chat.jsonl"]),
        (["chat.jsonl", "code-train.jsonl"], ["code-train.jsonl"]),
        (["test.jsonl"], ["test.jsonl"]),
        (["sample.jsonl", "data/train-0.jsonl"], ["sample.jsonl"]),
        (["a.jsonl", "c.NDJSON", "more/b.jsonl"], ["a.jsonl", "c.NDJSON"]),
        (["a.jsonl", "b.csv"], ["a.jsonl"]),
        (["dataset_infos.json", "data/train-0.jsonl"], ["data/train-0.jsonl"]),
    ],
)
def test_a_directory_gives_the_files_of_its_split_and_tells_what_it_leaves(tmp_path, caplog, files, read):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"demo": {}} if name == "dataset_infos.json" else {"text": name}))
    with caplog.at_level("INFO"):
        rows = [raw["text"] for _, raw, _, _ in open_rows(str(tmp_path), key="data.path") if raw]
    assert rows == read
    left = {name for name in files if name not in read and name != "dataset_infos.json"}
    assert all(name in caplog.text for name in left)


def test_a_changed_file_of_a_data_set_with_a_card_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    card = "configs:\n- config_name: default\n  data_files: data/*.jsonl"
    (folder / "README.md").write_text(f"---\n{card}\n---\n")
    for text in ("first", "second"):
        (folder / "data" / "train.jsonl").write_text(json.dumps({"text": text}))
        assert [raw["text"] for _, raw, _, _ in open_rows(str(folder), key="data.path") if raw] == [text]


def test_the_files_of_a_subset_are_those_below_the_directory(tmp_path):
    for name in ("train.jsonl", "a/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert list_source_files(str(tmp_path), "train") == [tmp_path / "train.jsonl"]
    assert list_source_files(str(tmp_path), "train", "a") == [tmp_path / "a" / "x.jsonl", tmp_path / "train.jsonl"]


def test_files_of_a_directory_may_have_different_columns(tmp_path):
    wider = [row | {"score": 1} for row in ROWS]
    (tmp_path / "train-0.jsonl").write_text(format_lines(ROWS))
    (tmp_path / "train-1.jsonl").write_text(format_lines(wider))
    assert [raw.row for raw in read_rows(tmp_path)] == ROWS + wider


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
@pytest.mark.parametrize(
    "value",
    [ROWS, {"data": ROWS}, {"version": "1", "meta": {"a": 1}, "rows": ROWS}],
    ids=["array", "object", "object with metadata"],
)
@pytest.mark.parametrize("indent", [None, 1, "a row a line"])
def test_a_file_of_a_single_json_value_holds_its_rows(tmp_path, name, value, indent):
    text = json.dumps(value, indent=indent if indent == 1 else None)
    (tmp_path / name).write_text(text if indent != "a row a line" else re.sub(r"(\[|\}, )(?=\{)", r"\1\n", text))
    assert [raw.row for raw in read_rows(tmp_path / name)] == ROWS


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}]},
        {"chat": [{"from": "human", "value": "a"}], "tools": [{"name": "f"}]},
        {"prompt": "a", "tools": [{"name": "f"}]},
        {"data": ["a", "b"]},
        {"text": "a", "tags": []},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_row_that_is_alone_in_its_file_is_a_row(tmp_path, row, indent):
    (tmp_path / "p.json").write_text(json.dumps(row, indent=indent))
    assert [raw.row for raw in read_rows(tmp_path / "p.json")] == [row]


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.jsonl.gz"])
def test_a_file_is_decompressed_whatever_it_is_called(tmp_path, name):
    for data in (gzip.compress(format_lines(ROWS).encode()), format_lines(ROWS).encode()):
        (tmp_path / name).write_bytes(data)
        assert [raw.row for raw in read_rows(tmp_path / name)] == ROWS


@pytest.mark.parametrize(
    "data",
    [format_lines(ROWS).encode("utf-16"), format_lines(ROWS).encode("utf-16-be"), b"PK\x03\x04\x14\0\0"],
    ids=["UTF-16", "UTF-16 without a mark", "a zip archive"],
)
def test_a_file_that_is_not_utf8_is_refused_in_one_line_with_the_remedy(tmp_path, data):
    (tmp_path / "p.jsonl").write_bytes(data)
    with pytest.raises(UserError, match=r"UTF-16 or a binary file.*write the file again, as UTF-8"):
        read_rows(tmp_path / "p.jsonl")


def test_broken_lines_are_named_with_line_number_and_reason(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"text": "a"}\n\n{"text": \n{"text": "\xff"}\n[1]\n' + b"[" * 60 + b'\n{"text": "b"}')
    rows = read_rows(file)
    assert [raw.row for raw in rows] == [{"text": "a"}, *[None] * 4, {"text": "b"}]
    assert [(raw.location, raw.reason) for raw in rows if raw.row is None] == [
        (f"{file}:3", "a line that cannot be parsed as JSON"),
        (f"{file}:4", "a line that is not UTF-8"),
        (f"{file}:5", "a line that is not a JSON object"),
        (f"{file}:6", "a line that cannot be parsed as JSON"),
    ]


def test_a_line_nested_too_deeply_is_a_broken_line(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("[" * 100_000 + "\n" + format_lines(ROWS[:1]))
    assert [raw.row for raw in read_rows(file)] == [None, ROWS[0]]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (pyarrow.array([0, 10**18, 0], pyarrow.timestamp("us")), "a value that is out of range"),
        (pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string()), "text that is not UTF-8"),
        (pyarrow.array(['{"a": 1}', "{no", None]).cast(pyarrow.json_()), "a value that cannot be parsed as JSON"),
    ],
    ids=["date", "text", "JSON"],
)
def test_a_value_that_cannot_be_read_loses_only_its_row_of_the_table(tmp_path, bad, reason):
    table = pyarrow.table({"text": ["a", "b", "c"], "column": bad})
    parquet.write_table(table, tmp_path / "p.parquet")
    rows = read_rows(tmp_path / "p.parquet")
    assert [raw.row and raw.row["text"] for raw in rows] == ["a", None, "c"]
    assert rows[1].reason == reason


def test_keys_that_tables_fill_with_null_are_removed(tmp_path):
    import datasets

    rows = [
        {"messages": [{"role": "user", "calls": [{"a": 1}]}]},
        {"messages": [{"role": "user", "calls": [{"b": 2}]}]},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "p.parquet")
    assert [raw.row for raw in read_rows(tmp_path / "p.parquet")] == rows


def test_maps_of_a_table_are_objects(tmp_path):
    calls = pyarrow.list_(pyarrow.struct([("arguments", pyarrow.map_(pyarrow.string(), pyarrow.string()))]))
    rows = [{"calls": [{"arguments": {"city": "Oslo", "days": "2"}}, {"arguments": {}}]}]
    entries = [[{"arguments": list(call["arguments"].items())} for call in row["calls"]] for row in rows]
    parquet.write_table(pyarrow.table({"calls": pyarrow.array(entries, calls)}), tmp_path / "p.parquet")
    assert [raw.row for raw in read_rows(tmp_path / "p.parquet")] == rows


@pytest.mark.parametrize("case", ["keys differ", "text or parts", "nulls"])
def test_json_columns_are_read_as_they_were_written(tmp_path, case):
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
        assert [raw.row for raw in read_rows(tmp_path / name)] == rows, name


def test_a_damaged_or_missing_file_is_refused_in_one_line(tmp_path):
    compressed = gzip.compress(format_lines(ROWS * 500).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(compressed[: len(compressed) // 2])
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
            read_rows(tmp_path / name)
        assert "\n" not in str(refused.value)


def test_a_data_set_with_a_loading_script_is_refused_in_one_line(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/rows.py").write_text("import datasets")
    with pytest.raises(UserError, match=r"^mixture.sources.s.path: must be a dataset that can be loaded, .*script"):
        read_rows(tmp_path / "rows")
