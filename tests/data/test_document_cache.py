"""A data set is tokenized once, and again when anything changes that its documents depend on."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import DatasetInfo, Features, SplitDict, SplitInfo, Value
from datasets.arrow_writer import ArrowWriter

from data import document_cache
from data.config import DataConf, DataSource, RowFormat, TurnSelection
from data.document_cache import fingerprint_documents, read_cached_documents, read_documents
from data.packing.documents import Documents
from data.sources.training_rows import count_training_rows
from models.io.errors import UserError
from tests.support.models.tiny import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKERS = ["<user>", "<assistant>", "<end>"]
SIZE = 400  # of the target's vocabulary


def build_tokenizer(template: str = TEMPLATE):
    return byte_tokenizer(MARKERS, template=template, eos_token="<end>")


@pytest.fixture
def conf(tmp_path) -> DataConf:
    """Return the configuration of a file of conversations, one of them without an answer."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Is {n} even?"},
                {"role": "assistant", "content": f"{n}: {n % 2 == 0}"},
            ],
            "category": "ab"[n % 2],
        }
        for n in range(20)
    ]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in [*rows, {"messages": rows[0]["messages"][:1]}]]
    file.write_text("\n".join(lines))
    return DataConf(source=DataSource.jsonl, path=str(file))


def assert_equal(documents: Documents, others: Documents) -> None:
    for name, value in vars(documents).items():
        other = getattr(others, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype
            assert np.array_equal(value, other), name
        else:
            assert dict(value) == dict(other) if name == "skipped" else value == other, name


def test_a_second_start_reads_the_same_documents_and_tokenizes_nothing(conf, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    first = read_cached_documents(conf, build_tokenizer(), SIZE, str(tmp_path))
    assert_equal(first, read_documents(conf, build_tokenizer(), SIZE))
    assert first.skipped
    monkeypatch.delattr(document_cache, "read_documents")
    assert_equal(read_cached_documents(conf, build_tokenizer(), SIZE, str(tmp_path)), first)
    assert "data: tokenized before, in " in caplog.text


def test_a_process_that_another_one_overtakes_reads_the_same_documents(conf, tmp_path, monkeypatch):
    """A file system without locks lets several tokenize the same data."""

    def read_slowly(*args):
        monkeypatch.undo()
        with monkeypatch.context() as patch:  # the other process
            patch.setattr(os, "getpid", lambda: 0)
            read_cached_documents(conf, build_tokenizer(), SIZE, str(tmp_path))
        return read_documents(*args)

    monkeypatch.setattr(document_cache, "read_documents", read_slowly)
    documents = read_cached_documents(conf, build_tokenizer(), SIZE, str(tmp_path))
    assert_equal(documents, read_documents(conf, build_tokenizer(), SIZE))
    (path,) = (file for file in (tmp_path / "documents").iterdir() if file.is_dir())
    assert path.name == fingerprint_documents(conf, build_tokenizer(), SIZE)


def test_every_change_of_documents_changes_their_fingerprint(conf, tmp_path, monkeypatch):
    def fingerprint(conf=conf, template=TEMPLATE, size=SIZE):
        return fingerprint_documents(conf, build_tokenizer(template), size)

    same = [fingerprint(), fingerprint(replace(conf, row_length=64, seed=3))]
    others = [
        fingerprint(template=TEMPLATE + " "),
        fingerprint(size=SIZE + 1),
        fingerprint(replace(conf, limit=3)),
        fingerprint(replace(conf, turns=TurnSelection.last)),
        fingerprint(replace(conf, split="train[1:]")),
        fingerprint(replace(conf, template={"enable_thinking": False})),
        fingerprint(replace(conf, column="other")),
        fingerprint(replace(conf, format=RowFormat.text)),
    ]
    file = tmp_path / "rows.jsonl"
    text = file.read_text()
    middle = len(text) // 2 + text[len(text) // 2 :].index("?")
    file.write_text(text[:middle] + "!" + text[middle + 1 :])  # of the same size
    others.append(fingerprint())
    file.write_text(text)
    monkeypatch.setattr(document_cache, "CODE", tmp_path)  # other code, as after an update
    others.append(fingerprint())
    assert len(set(same)) == 1
    assert len({*same, *others}) == 1 + len(others)


def test_the_fingerprint_of_a_folder_depends_on_every_file(conf, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    conf = replace(conf, source=DataSource.dataset, path=str(folder))
    before = fingerprint_documents(conf, build_tokenizer(), SIZE)
    (folder / "b.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    assert fingerprint_documents(conf, build_tokenizer(), SIZE) != before


def test_data_that_cannot_be_read_is_refused_each_time(conf, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"^data\.format: some row must have the format auto"):
            read_cached_documents(conf, build_tokenizer(), SIZE, str(tmp_path))


def save_in_hub_cache(cache: Path, revision: str, texts: list[str]) -> None:
    """Write rows of the data set someone/rows as `datasets` stores a download."""
    folder = cache / "someone___rows/default/0.0.0" / revision
    folder.mkdir(parents=True)
    with ArrowWriter(path=str(folder / "rows-train.arrow")) as writer:
        for text in texts:
            writer.write({"text": text})
        count, size = writer.finalize()
    split = SplitInfo(name="train", num_examples=count, num_bytes=size, dataset_name="rows")
    DatasetInfo(
        features=Features({"text": Value("string")}),
        builder_name="json",
        dataset_name="rows",
        config_name="default",
        version="0.0.0",
        splits=SplitDict({"train": split}),
    ).write_to_directory(str(folder))


PRINT_HASHES = (
    "import sys; from data.config import DataConf, DataSource; "
    "from data.sources.training_rows import iter_content_hashes; "
    "conf = DataConf(source=DataSource.dataset, path='someone/rows', split=sys.argv[1]); "
    "print(*iter_content_hashes(conf))"
)


def hash_in_a_process(cache: Path, split: str) -> str:
    """Return the hash that a separate process computes of the contents of someone/rows."""
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PRINT_HASHES, split]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


@pytest.mark.system
def test_data_of_the_hub_has_a_hash_that_stays_and_changes_with_split_and_revision(tmp_path):
    """`datasets` does not document that of `_fingerprint`, so each version is tested."""
    first, second = tmp_path / "first", tmp_path / "second"
    save_in_hub_cache(first, "1" * 40, ["a", "b", "c"])
    save_in_hub_cache(second, "2" * 40, ["a", "b", "d"])
    same = [hash_in_a_process(first, "train") for _ in range(2)]
    others = [hash_in_a_process(first, "train[1:]"), hash_in_a_process(second, "train")]
    assert same[0].startswith("('someone/rows', '")
    assert len(set(same)) == 1
    assert len({*same, *others}) == 3


def test_rows_are_counted_before_they_are_read(conf):
    with Path(str(conf.path)).open() as file:
        lines = sum(1 for _ in file)
    assert count_training_rows(conf) == lines
    assert count_training_rows(replace(conf, limit=2)) == 2
    assert count_training_rows(replace(conf, split="train[:50%]")) is None
    assert count_training_rows(replace(conf, path="name/of-the-hub")) is None
