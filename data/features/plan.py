"""Plan of a capture: the rows that the target reads, their shards, and the bytes that they take."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
METADATA = {"format": "pt"}
SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
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
            packed=packed,
            schema=schema,
            supervised_mask=supervised_mask,
            segment_index=index,
            shard_token_counts=counts,
            rows_per_shard=rows_per_shard,
        )
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
            pieces = range(*self.packed.starts[row : row + 2].tolist())
            for piece, (_, begin, end, _) in zip(pieces, self.packed.table[pieces], strict=True):
                right += int(end - begin)
                count, first = (
                    int(self.segment_index.tokens[piece]),
                    int(self.segment_index.first[piece]),
                )
                # an overlap's tokens are stored with the piece before: count from the right
                stored = np.arange(right - count, right)
                positions.append(stored)
                supervised.append(stored[self.supervised_mask[first : first + count]])
        return np.concatenate(positions), np.concatenate(supervised)

    def document_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the documents file, as data/features/reader.py reads them."""
        documents = self.packed.documents
        columns = {name: getattr(documents, name) for name in DOCUMENT_FIELDS}
        segments = {
            f"runs.{name}": values
            for name, values in vars(self.segment_index.sorted_by_token()).items()
        }
        arrays = columns | segments | {"supervised": self.supervised_mask}
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}

    # --- sizes, in bytes ----------------------------------------------------------------------

    @property
    def documents_bytes(self) -> int:
        """Return the size of the documents file."""
        return safetensors_bytes(
            {n: (t.dtype, t.shape) for n, t in self.document_tensors().items()}
        )

    def shard_bytes(self, schema: FeatureSchema | None = None) -> Int[np.ndarray, " shards"]:
        """Compute the size of each shard, with this plan's schema or another."""
        specs = (schema or self.schema).tensor_specs
        shards = (
            {s.name: (s.dtype, (tokens if s.per_token else supervised, *s.shape)) for s in specs}
            for tokens, supervised in self.shard_token_counts.tolist()
        )
        return np.array([safetensors_bytes(tensors) for tensors in shards])

    def total_bytes(self, schema: FeatureSchema | None = None) -> int:
        """Compute the size of the store, with this plan's schema or another."""
        return int(self.shard_bytes(schema).sum()) + self.documents_bytes


def safetensors_bytes(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> int:
    """Compute the size of a safetensors file: header length, header, and tensors end to end.

    >>> import safetensors.torch
    >>> small = {"x": torch.zeros(3, 5, dtype=torch.int8), "y": torch.zeros(70)}
    >>> file = safetensors.torch.save(small, metadata=METADATA)
    >>> safetensors_bytes({name: (x.dtype, x.shape) for name, x in small.items()}) == len(file)
    True
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda t: (-t[1][0].itemsize, t[0])):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    header_bytes = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-header_bytes // 8) * 8 + end  # headers are padded to multiples of 8
