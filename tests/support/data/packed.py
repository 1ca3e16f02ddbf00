"""Packed rows that say exactly what a test wants."""

import numpy as np

from data.packing.documents import Documents, Packed
from data.sources.rows import TokenizedDocument
from models.drafts.base import Batch


def packed_of(batch: Batch) -> Packed:
    """Rows that give this batch back."""
    texts, table, starts = [], [], [0]
    for ids, answer, document in zip(batch.input_ids, batch.answer_mask, batch.document_ids, strict=True):
        for number in range(int(document.max()) + 1):
            inside = document == number
            texts.append(TokenizedDocument(ids=ids[inside].tolist(), answer=answer[inside].tolist()))
            table.append((len(texts) - 1, 0, int(inside.sum()), 0))
        starts.append(len(table))
    return Packed(
        documents=Documents.from_documents(texts),
        table=np.array(table, np.int32),
        starts=np.array(starts),
        length=batch.input_ids.shape[1],
    )


def documents_of(packed: Packed) -> list[TokenizedDocument]:
    """What the rows hold, as a reader of their tensors sees it."""
    batch = packed.batch(list(range(len(packed))))
    found = []
    for ids, answer, document, positions in zip(
        batch.input_ids, batch.answer_mask, batch.document_ids, batch.positions, strict=True
    ):
        for number in range(int(document.max()) + 1):
            inside = document == number
            assert positions[inside].tolist() == list(range(int(inside.sum())))
            found.append(TokenizedDocument(ids=ids[inside].tolist(), answer=answer[inside].tolist()))
    return found
