"""Documents are stored unchanged, in a few bytes a token, and rows are built on demand."""

import json

import numpy as np
import pytest

from data.config import DataConf, DataSource
from data.document_cache import read_documents
from data.packing.documents import Documents
from data.packing.pack import pack_documents
from data.sources.prepared_rows import PreparedRow, RecordedDocument, write_prepared_rows
from data.sources.rows import TokenizedDocument, document_from_pair
from models.io.errors import UserError
from tests.data.chat.test_tokenization import CHAT, PLAIN, build_chat_tokenizer

PIECES = [
    TokenizedDocument(ids=[1, 2, 3], answer=[False, False, True], category="code", language="en"),
    TokenizedDocument(ids=[], answer=[], first_question=2**64 - 1),
    TokenizedDocument(ids=[4, 5, 6], answer=[False, True, True], category="code", language="zh"),
]


def test_documents_come_back_unchanged():
    documents = Documents.from_documents(iter(PIECES))
    assert list(documents) == PIECES
    assert documents.lengths.tolist() == [3, 0, 3]
    assert documents.categories == ["code", ""]
    assert len(Documents.from_documents([])) == 0
    with pytest.raises(IndexError):
        documents[3]


def test_a_token_takes_five_bytes_and_a_document_twenty_eight():
    documents = Documents.from_documents(document_from_pair([1] * 100, [2] * 900) for _ in range(20))
    arrays = [value for value in vars(documents).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 20 * 1000 * 5 + 20 * 28 + 8


def write_rows(path, *rows) -> DataConf:
    file = path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return DataConf(source=DataSource.jsonl, path=str(file))


def test_conversations_are_read_and_other_rows_are_counted(tmp_path):
    conf = write_rows(tmp_path, {"messages": CHAT}, {"nothing": 1})
    documents = read_documents(conf, build_chat_tokenizer(PLAIN))
    assert (len(documents), sum(documents.skipped.values())) == (1, 1)
    _, report = pack_documents(documents, conf.row_length)
    assert f"1 rows skipped: {next(iter(documents.skipped))}" in str(report)


@pytest.mark.parametrize(("ids", "wrong"), [([1, -1], -1), ([9, 300], 300), ([2**40, 1], 2**40), ([256], 256)])
def test_token_ids_beyond_the_vocabulary_are_refused_with_their_line(tmp_path, ids, wrong):
    good = {"ids": [0, 255], "answer": [False, True]}
    conf = write_rows(tmp_path, good, {"ids": ids, "answer": [True] * len(ids)})
    message = (
        rf"data: token ids must be below the target's vocabulary of 256 and not negative, got "
        rf"{wrong} at {conf.path}:2; "
    )
    with pytest.raises(UserError, match=message):
        read_documents(conf, build_chat_tokenizer(None), vocab_size=256)


def test_recorded_ids_of_another_tokenizer_are_refused_with_their_row(tmp_path):
    document = RecordedDocument(ids=[5, 300], spans=[[1, 2]])
    rows = [PreparedRow(id="r1", source="s", text="a", documents=[document])]
    write_prepared_rows(tmp_path / "train-00000-of-00001.parquet", rows, {})
    conf = DataConf(source=DataSource.prepared, path=str(tmp_path))
    with pytest.raises(UserError, match=rf"got 300 at {tmp_path}, row r1"):
        read_documents(conf, build_chat_tokenizer(None), vocab_size=256)


def test_a_text_that_names_a_token_without_an_embedding_is_counted(tmp_path):
    tokenizer = build_chat_tokenizer(PLAIN)
    size = len(tokenizer)
    tokenizer.add_tokens(["[EXTRA]"])
    plain, marked = ([{**m, "content": m["content"] + n * "[EXTRA]"} for m in CHAT[1:3]] for n in (0, 1))
    rows = [{"messages": plain}, {"messages": marked}, {"text": "Once"}, {"text": "[EXTRA]"}]
    documents = read_documents(write_rows(tmp_path, *rows), tokenizer, vocab_size=size)
    assert len(documents) == 2
    assert documents.skipped == {f"token {size} has no embedding in the target": 2}


@pytest.mark.parametrize("fault", ["m.content.index('zz')", "m.content[99].x.y", "1 / 0", "m.content | round", "m + 1"])
def test_any_exception_of_a_template_is_counted_in_one_line(tmp_path, fault):
    failing = "{% if messages[0].role == 'user' %}{% for m in messages %}{{ " + fault + " }}"
    template = failing + "{% endfor %}{% endif %}" + PLAIN
    conf = write_rows(tmp_path, {"messages": CHAT}, {"messages": CHAT[1:3]})
    documents = read_documents(conf, build_chat_tokenizer(template))
    assert len(documents) == 1
    ((reason, count),) = documents.skipped.items()
    assert (reason.startswith("rejected by the chat template: "), count) == (True, 1)
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("names", "tools", "is_read"),
    [
        (["rag", "tool_use"], None, False),
        (["rag"], [{"name": "f"}], False),
        (["rag", "tool_use"], [{"name": "f"}], True),
        (["default", "tool_use"], None, True),
    ],
)
def test_a_tokenizer_with_named_templates_needs_the_one_that_is_used(tmp_path, names, tools, is_read):
    tokenizer = build_chat_tokenizer(None)
    tokenizer.chat_template = dict.fromkeys(names, PLAIN)
    conf = write_rows(tmp_path, {"messages": CHAT, "tools": tools})
    if is_read:
        assert len(read_documents(conf, tokenizer)) == 1
        return
    with pytest.raises(UserError, match=r"got none .*multiple chat templates with no default"):
        read_documents(conf, tokenizer)
