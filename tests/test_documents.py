"""Documents are kept as they came, a few bytes a token, and rows are made when asked for."""

import numpy as np
import pytest

from data.conversations import Tokenised
from data.documents import Documents, Packed, Piece
from data.tokens import from_pair

PIECES = [
    Tokenised(ids=[1, 2, 3], answer=[False, False, True], category="code", language="en"),
    Tokenised(ids=[], answer=[]),
    Tokenised(ids=[4, 5, 6], answer=[False, True, True], category="code", language="zh"),
]


def test_documents_come_back_as_they_were():
    documents = Documents.of(iter(PIECES))
    assert list(documents) == PIECES
    assert documents.lengths.tolist() == [3, 0, 3]
    assert documents.categories == ["code", ""]
    assert len(Documents.of([])) == 0
    with pytest.raises(IndexError):
        documents[3]


def test_a_token_takes_five_bytes_and_a_document_sixteen():
    documents = Documents.of(from_pair([1] * 100, [2] * 900) for _ in range(20))
    arrays = [value for value in vars(documents).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 20 * 1000 * 5 + 20 * 16 + 8


def test_a_row_shows_its_pieces_side_by_side():
    rows = Packed(
        documents=Documents.of(PIECES), table=np.array([[2, 0, 3, 0], [0, 1, 3, 1]], np.int32),
        starts=np.array([0, 0, 2]), length=6, pad_id=9,
    )  # fmt: skip
    assert rows.pieces([1]) == [[Piece(2, 0, 3, 0), Piece(0, 1, 3, 1)]]
    batch = rows.batch([1, 0])
    assert batch.ids.tolist() == [[4, 5, 6, 2, 3, 9], [9] * 6]
    assert batch.answer.int().tolist() == [[0, 1, 1, 0, 1, 0], [0] * 6]
    assert batch.document.tolist() == [[0, 0, 0, 1, 1, -1], [-1] * 6]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]
