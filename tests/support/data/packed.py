"""Build packed rows with chosen contents, and read them back."""

import numpy as np

from data.packing.documents import Documents, Packed
from data.sources.rows import TokenizedDocument
from models.batch import Batch


def packed_of(batch: Batch) -> Packed:
    """Build packed rows whose batch is this batch."""
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
    """Read the documents of packed rows back from the tensors of their batch."""
    batch = packed.batch(list(range(len(packed))))
    documents = []
    for ids, answer, document, positions in zip(
        batch.input_ids, batch.answer_mask, batch.document_ids, batch.positions, strict=True
    ):
        for number in range(int(document.max()) + 1):
            inside = document == number
            assert positions[inside].tolist() == list(range(int(inside.sum())))
            documents.append(TokenizedDocument(ids=ids[inside].tolist(), answer=answer[inside].tolist()))
    return documents
