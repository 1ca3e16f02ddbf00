"""Packing loses nothing unsaid, and the order is a pure function of the step."""

import json
from itertools import chain

import pytest
import torch

from data.batches import Order, answer_counts, pack, prepare
from data.config import DataConf, Source
from data.tokens import Tokenised, from_pair
from models.errors import UserError
from tests.test_tokens import CHAT, PLAIN, chat_tokenizer


def piece(prompt: int, answer: int, start: int = 100) -> Tokenised:
    ids = list(range(start, start + prompt + answer))
    return from_pair(ids[:prompt], ids[prompt:])


def unpacked(packed) -> list[Tokenised]:
    """The documents that the rows hold."""
    found = []
    for row in range(len(packed)):
        for number in range(int(packed.document[row].max()) + 1):
            inside = packed.document[row] == number
            assert packed.positions[row, inside].tolist() == list(range(int(inside.sum())))
            ids, answer = packed.ids[row, inside], packed.answer[row, inside]
            found.append(Tokenised(ids=ids.tolist(), answer=answer.tolist()))
    return found


def test_rows_are_drawn_as_documents_side_by_side():
    packed, report = pack([piece(2, 3), piece(1, 2, 200), piece(4, 4, 300)], length=10, pad_id=9)
    assert packed.ids.tolist() == [
        [300, 301, 302, 303, 304, 305, 306, 307, 9, 9],
        [100, 101, 102, 103, 104, 200, 201, 202, 9, 9],
    ]
    assert packed.document.tolist() == [[0] * 8 + [-1] * 2, [0] * 5 + [1] * 3 + [-1] * 2]
    assert packed.positions[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]
    assert packed.answer[1].int().tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]
    assert (report.documents, report.rows, report.fill) == (3, 2, 0.8)
    assert report.supervised == 9 / 16


def test_no_document_is_split_or_lost():
    sizes = torch.randint(1, 30, (500, 2), generator=torch.Generator().manual_seed(0)).tolist()
    pieces = [piece(p, a, 100 * i) for i, (p, a) in enumerate(sizes)]
    packed, report = pack(pieces, length=64)
    assert sorted(unpacked(packed), key=lambda d: d.ids[0]) == pieces
    assert (report.documents, report.truncated, report.dropped) == (500, 0, 0)
    assert report.fill > 0.95
    assert torch.equal(pack(pieces, length=64)[0].ids, packed.ids)


def test_no_document_sees_another():
    packed, _ = pack([piece(2, 3), piece(1, 2, 200)], length=10)
    sees = packed.batch([0]).attends()[0, 0]
    assert not sees[5:8, :5].any()
    assert not sees[:5, 5:].any()
    assert sees[7, 5:8].all()


def test_what_does_not_fit_is_cut_and_counted():
    packed, report = pack([piece(6, 12), piece(20, 5, 200), piece(3, 0, 300)], length=16)
    assert unpacked(packed) == [piece(6, 10)]
    assert (report.documents, report.truncated, report.dropped) == (1, 1, 2)
    assert "1 documents in 1 rows of 16 tokens" in str(report)
    assert "1 cut, 2 dropped without an answer" in str(report)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "data: must hold a document, got none"),
        ([piece(3, 0), piece(5, 0)], "got none in 2 documents; check the chat template"),
        ([piece(0, 3), piece(0, 5)], "got only answer tokens in 2 documents; check the chat"),
        ([piece(20, 5)], "data.length: must reach beyond the prompts, got 16"),
    ],
)
def test_masks_that_train_nothing_or_everything_are_refused(pieces, message):
    with pytest.raises(UserError, match=message):
        pack(pieces, length=16)


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 4), (10, 4), (3, 8)])
def test_every_epoch_visits_each_row_once(rows, batch_size):
    order = Order(rows=rows, batch_size=batch_size, seed=3)
    batches = [order.batch(step) for step in range(3 * rows)]
    assert all(len(batch) == batch_size for batch in batches)
    visits = list(chain(*batches))
    epochs = [visits[start : start + rows] for start in range(0, len(visits), rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_an_order_resumes_from_the_step_alone():
    whole = [Order(rows=11, batch_size=4, seed=5).batch(step) for step in range(9)]
    assert Order(rows=11, batch_size=4, seed=5).batch(8) == whole[8]
    assert [Order(rows=11, batch_size=4, seed=6).batch(step) for step in range(9)] != whole


def test_ranks_share_a_batch_without_overlap():
    order = Order(rows=40, batch_size=12, seed=0)
    for step in range(5):
        shares = [order.batch(step, rank, 4) for rank in range(4)]
        assert [len(share) for share in shares] == [3] * 4
        assert sorted(chain(*shares)) == sorted(order.batch(step))
    with pytest.raises(UserError, match=r"optim.batch_size: .* got 12 for 5"):
        order.batch(0, 0, 5)


def test_only_answer_tokens_are_counted():
    packed, _ = pack([from_pair([1, 1, 2], [2, 3]), from_pair([1], [3])], length=16, pad_id=3)
    assert answer_counts(packed, 5).tolist() == [0, 0, 1, 2, 0]
    with pytest.raises(UserError, match="below the target's vocabulary of 3, got 3"):
        answer_counts(packed, 3)


def test_conversations_are_prepared(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [{"messages": CHAT}, {"nothing": 1}]))
    tokenizer = chat_tokenizer(PLAIN)
    _, report = prepare(DataConf(source=Source.jsonl, path=str(path)), tokenizer)
    assert (report.documents, sum(report.skipped.values())) == (1, 1)
    assert "1 rows skipped: no known columns" in str(report)


def test_a_conversation_that_the_template_refuses_is_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in [CHAT, CHAT[1:]]))
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = chat_tokenizer(strict + PLAIN)
    _, report = prepare(DataConf(source=Source.jsonl, path=str(path)), tokenizer)
    assert report.documents == 1
    assert report.skipped == {"refused by the chat template: no system": 1}


def test_texts_and_ids_are_prepared(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"text": "Hello there"}, {"ids": [7, 8, 9], "answer": [False, True, True]}]
    path.write_text("\n".join(json.dumps(row) for row in lines))
    packed, report = prepare(DataConf(source=Source.jsonl, path=str(path)), chat_tokenizer(None))
    assert (report.documents, report.skipped) == (2, {})
    assert Tokenised(ids=[7, 8, 9], answer=[False, True, True]) in unpacked(packed)
