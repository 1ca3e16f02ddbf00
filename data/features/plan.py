"""Plan of a capture: the rows that the target reads, their shards, and the bytes that they take."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from data.features.index import (
    SegmentIndex,
    build_segment_index,
    find_supervised_tokens,
    truncate_documents,
)
from data.features.schema import FeatureSchema
from data.packing.documents import Documents, Packed
from data.packing.pack import PackReport, pack_documents

DOCUMENT_FIELDS = ("ids", "answer", "starts", "category", "language", "conversation")
HEADER_BYTES = 2048  # upper bound of a file's header
MB = 10**6


@dataclass(kw_only=True)
class CapturePlan:
    """The packed rows that the target reads, and where their features are stored."""

    packed: Packed
    schema: FeatureSchema
    supervised_mask: Bool[np.ndarray, " tokens"]  # over the tokens of all documents
    segment_index: SegmentIndex  # a segment for each piece, row after row
    shard_token_counts: Int[np.ndarray, "shards 2"]  # tokens, supervised tokens
    rows_per_shard: int

    @classmethod
    def from_documents(
        cls, documents: Documents, schema: FeatureSchema, *, length: int, overlap: int | None,
        batch: int, shard_mb: float,
    ) -> tuple["CapturePlan", PackReport]:  # fmt: skip
        """Pack documents into rows and assign them to shards of complete batches."""
        if overlap is None:
            documents = truncate_documents(documents, length)
        packed, report = pack_documents(documents, length, overlap=overlap)
        supervised_mask = find_supervised_tokens(documents)
        max_batch_bytes = schema.num_bytes(length, length) * batch
        rows_per_shard = batch * max(1, int(shard_mb * MB / max_batch_bytes))
        index, counts = build_segment_index(packed, supervised_mask, rows_per_shard=rows_per_shard)
        plan = cls(
            packed=packed, schema=schema, supervised_mask=supervised_mask, segment_index=index,
            shard_token_counts=counts, rows_per_shard=rows_per_shard,
        )  # fmt: skip
        return plan, report

    def shard_rows(self, shard: int) -> list[int]:
        """List the packed rows that a shard holds."""
        first = shard * self.rows_per_shard
        return list(range(first, min(first + self.rows_per_shard, len(self.packed))))

    def stored_positions(
        self, rows: list[int]
    ) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " supervised"]]:
        """Return the positions, in `rows` laid end to end, that the shard stores, in its order.

        The first array is of all tokens, the second of supervised ones.
        """
        positions, supervised = [], []
        for number, row in enumerate(rows):
            right = number * self.packed.length
            for piece in range(*self.packed.starts[row : row + 2].tolist()):
                _, begin, end, _ = self.packed.table[piece].tolist()
                right += end - begin
                count = int(self.segment_index.tokens[piece])
                first = int(self.segment_index.first[piece])
                # an overlap's tokens are stored with the piece before: count from the right
                stored = np.arange(right - count, right)
                positions.append(stored)
                supervised.append(stored[self.supervised_mask[first : first + count]])
        return np.concatenate(positions), np.concatenate(supervised)

    def document_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the documents file, as data/features/reader.py reads them."""
        documents, segments = self.packed.documents, vars(self.segment_index.sorted_by_token())
        arrays = (
            {name: getattr(documents, name) for name in DOCUMENT_FIELDS}
            | {f"runs.{name}": values for name, values in segments.items()}
            | {"supervised": self.supervised_mask}
        )
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}

    @property
    def total_bytes(self) -> int:
        """Estimate the bytes of the store, a little above its size."""
        tokens, supervised = self.shard_token_counts.sum(0).tolist()
        document_bytes = sum(tensor.nbytes for tensor in self.document_tensors().values())
        num_files = 1 + len(self.shard_token_counts)
        return self.schema.num_bytes(tokens, supervised) + document_bytes + HEADER_BYTES * num_files
