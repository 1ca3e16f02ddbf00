"""Packing fills the rows, counts every loss and is a pure function of the documents."""

import numpy as np
import pytest
import torch

from data.packing.documents import Documents
from data.packing.pack import best_fit, check_positions, pack_documents
from data.sources.rows import TokenizedDocument, document_from_pair
from models.io.errors import UserError
from tests.support.data.packed import documents_of


def build_piece(prompt: int, answer: int, start: int = 100) -> TokenizedDocument:
    ids = list(range(start, start + prompt + answer))
    return document_from_pair(ids[:prompt], ids[prompt:])


def build_documents(*pieces: TokenizedDocument) -> Documents:
    return Documents.from_documents(pieces)


def test_rows_hold_documents_side_by_side():
    documents = build_documents(build_piece(2, 3), build_piece(1, 2, 200), build_piece(4, 4, 300))
    packed, report = pack_documents(documents, 10)
    batch = packed.batch([0, 1])
    assert batch.input_ids.tolist() == [
        [300, 301, 302, 303, 304, 305, 306, 307, 0, 0],
        [100, 101, 102, 103, 104, 200, 201, 202, 0, 0],
    ]
    assert batch.document_ids.tolist() == [[0] * 8 + [-1] * 2, [0] * 5 + [1] * 3 + [-1] * 2]
    assert batch.positions[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]
    assert batch.answer_mask[1].int().tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]
    assert batch.context_mask is None
    assert (report.documents, report.rows, report.fill) == (3, 2, 0.8)
    assert report.supervised == 9 / 16


@pytest.mark.parametrize(("length", "context"), [(5, 5), (9, 8), (9, None)])
def test_rows_may_be_longer_than_the_target_reads_while_documents_are_not(length, context):
    check_positions(build_documents(build_piece(2, 3), build_piece(4, 4)), length, context)


def test_documents_past_the_targets_last_position_are_refused_with_the_longest_row():
    documents = build_documents(build_piece(2, 3), build_piece(4, 4))
    with pytest.raises(UserError, match=r"as 1 are, got 9; set data\.row_length=7$"):
        check_positions(documents, 9, 7)


def test_no_document_is_split_or_lost():
    sizes = torch.randint(1, 30, (500, 2), generator=torch.Generator().manual_seed(0)).tolist()
    pieces = [build_piece(p, a, 100 * i) for i, (p, a) in enumerate(sizes)]
    packed, report = pack_documents(build_documents(*pieces), 64)
    assert sorted(documents_of(packed), key=lambda d: d.ids[0]) == pieces
    assert (report.documents, report.truncated, report.split, report.dropped) == (500, 0, 0, 0)
    again, _ = pack_documents(build_documents(*pieces), 64)
    assert np.array_equal(again.table, packed.table)


def draw_conversation_lengths(documents: int, length: int) -> np.ndarray:
    """Draw the tokens of conversations as those of ShareGPT: lognormal, median 800, cut at the row length."""
    sizes = np.random.default_rng(0).lognormal(np.log(800), 1.05, documents)
    return sizes.astype(int).clip(8, length)


@pytest.mark.parametrize("length", [2048, 4096, 16384])
def test_rows_are_filled_to_97_percent(length):
    sizes = draw_conversation_lengths(20_000, length)
    used = np.bincount(best_fit(sizes, length), weights=sizes)
    assert used.max() <= length
    assert used.mean() >= 0.97 * length


@pytest.mark.parametrize(
    ("least", "most", "fill"), [(1025, 1064, 0.51), (683, 722, 0.69), (512, 1024, 0.90), (341, 682, 0.94)]
)
def test_lengths_that_best_fit_cannot_pack_fill_as_much_as_the_docs_promise(least, most, fill):
    """The figures are those of docs/packing.md, for rows of 2,048 tokens."""
    sizes = np.random.default_rng(0).integers(least, most + 1, 20_000)
    rows = int(best_fit(sizes, 2048).max()) + 1
    assert round(sizes.sum() / (rows * 2048), 2) == fill


def test_no_document_attends_to_another():
    packed, _ = pack_documents(build_documents(build_piece(2, 3), build_piece(1, 2, 200)), 10)
    sees = packed.batch([0]).attention_mask()[0, 0]
    assert not sees[5:8, :5].any()
    assert not sees[:5, 5:].any()
    assert sees[7, 5:8].all()


def test_documents_that_do_not_fit_are_truncated_and_counted():
    packed, report = pack_documents(
        build_documents(build_piece(6, 12), build_piece(20, 5, 200), build_piece(3, 0, 300)), 16
    )
    assert documents_of(packed) == [build_piece(6, 10)]
    assert (report.documents, report.truncated, report.dropped) == (1, 1, 2)
    assert "1 documents in 1 rows of 16 tokens" in str(report)
    assert "1 cut, 2 dropped without an answer that fits" in str(report)


def test_only_the_documents_with_the_given_numbers_are_packed():
    packed, report = pack_documents(
        build_documents(*[build_piece(2, 3, 100 * i) for i in range(4)]), 16, document_numbers=np.array([3])
    )
    assert documents_of(packed) == [build_piece(2, 3, 300)]
    assert (report.documents, report.dropped) == (1, 0)


def test_rows_too_short_for_any_prompt_are_refused():
    with pytest.raises(UserError, match=r"data.row_length: must reach beyond the prompts, got 16"):
        pack_documents(build_documents(build_piece(20, 5)), 16)
