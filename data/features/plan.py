"""Plan of a capture: the rows that the target reads, their shards, and where each token lies.

A segment is a range of tokens that are contiguous in the documents and in their shard: a document, or a piece of one
that was split. A token that two pieces share is stored with the earlier one, where the target read more of its context.
docs/features.md (On disk) has a picture.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from data.config import CaptureConf
from data.features.schema import FeatureSchema
from data.packing.documents import Documents, Packed
from data.packing.pack import BEGIN, DOCUMENT, END, PackReport, pack_documents

DOCUMENT_FIELDS = ("ids", "answer", "starts", "category", "language", "conversation", "first_question")
MB = 10**6


@dataclass(kw_only=True)
class SegmentIndex:
    """The segments of a store, and where their features begin in their shard."""

    first: Int[np.ndarray, " segments"]  # int64: first token, in all documents end to end
    tokens: Int[np.ndarray, " segments"]  # int32: number of tokens
    shard: Int[np.ndarray, " segments"]  # int32
    token: Int[np.ndarray, " segments"]  # int64: first row in the tensors that have one per token
    row: Int[np.ndarray, " segments"]  # int64: first row in the tensors of supervised tokens


def find_supervised_tokens(documents: Documents) -> Bool[np.ndarray, " tokens"]:
    """Return a mask of answer tokens and the tokens right before them, which are all losses use.

    >>> from data.sources.rows import TokenizedDocument
    >>> first = TokenizedDocument(ids=[1, 2, 3, 4], answer=[False, False, True, False])
    >>> second = TokenizedDocument(ids=[5, 6], answer=[True, False])
    >>> find_supervised_tokens(Documents.from_documents([first, second])).astype(int)
    array([0, 1, 1, 0, 1, 0])
    """
    supervised = documents.answer.copy()
    supervised[:-1] |= documents.answer[1:]
    last = documents.starts[1:] - 1
    supervised[last] = documents.answer[last]  # the token after it belongs to the next document
    return supervised


def truncate_documents(documents: Documents, length: int) -> Documents:
    """Return the documents, each cut to at most `length` tokens."""
    position = np.arange(len(documents.ids)) - np.repeat(documents.starts[:-1], documents.lengths)
    return replace(
        documents,
        ids=documents.ids[position < length],
        answer=documents.answer[position < length],
        starts=np.concatenate([[0], documents.lengths.clip(max=length).cumsum()]),
    )


def build_segment_index(
    packed: Packed, supervised_mask: Bool[np.ndarray, " tokens"], *, rows_per_shard: int
) -> tuple[SegmentIndex, Int[np.ndarray, "shards 2"]]:
    """Return one segment for each piece, row after row, and each shard's counts of all and of supervised tokens."""
    document, begin, end = packed.table[:, [DOCUMENT, BEGIN, END]].astype(np.int64).T
    begin = np.maximum(begin, _previous_piece_ends(document, begin, end))
    first = packed.documents.starts[document] + begin
    spans = zip(first.tolist(), (first + end - begin).tolist(), strict=True)
    supervised = (np.count_nonzero(supervised_mask[start:stop]) for start, stop in spans)
    sizes = np.stack([end - begin, np.fromiter(supervised, np.int64, len(first))], 1)

    shard = np.repeat(np.arange(len(packed)), np.diff(packed.starts)) // rows_per_shard
    totals = np.zeros((int(shard[-1]) + 1, 2), np.int64)
    np.add.at(totals, shard, sizes)
    token, row = (sizes.cumsum(0) - sizes - (totals.cumsum(0) - totals)[shard]).T
    tokens, shard = sizes[:, 0].astype(np.int32), shard.astype(np.int32)
    return SegmentIndex(first=first, tokens=tokens, shard=shard, token=token, row=row), totals


def _previous_piece_ends(
    document: Int[np.ndarray, " pieces"], begin: Int[np.ndarray, " pieces"], end: Int[np.ndarray, " pieces"]
) -> Int[np.ndarray, " pieces"]:
    """Return the end of the piece before each piece in its document, 0 for the first piece."""
    order = np.lexsort((begin, document))
    previous_ends = np.zeros_like(end)
    previous_ends[order[1:]] = end[order][:-1] * (np.diff(document[order]) == 0)
    return previous_ends


class Segment(NamedTuple):
    """Tokens that are contiguous in the documents and in a shard."""

    first: int  # index in the tokens of all documents end to end
    shard: int
    token_rows: slice  # rows of the tensors that have one per token
    supervised_rows: slice  # rows of the tensors of supervised tokens
    supervised_mask: Bool[np.ndarray, " token_rows"]


def find_segments(
    index: SegmentIndex, supervised_mask: Bool[np.ndarray, " tokens"], begin: int, end: int
) -> Iterator[Segment]:
    """Yield the stored segments of tokens [begin, end) from left to right."""
    left = max(int(index.first.searchsorted(begin, "right")) - 1, 0)
    for number in range(left, int(index.first.searchsorted(end))):
        first, count = int(index.first[number]), int(index.tokens[number])
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            token = int(index.token[number]) + low - first
            row = int(index.row[number]) + int(np.count_nonzero(supervised_mask[first:low]))
            mask = supervised_mask[low:high]
            yield Segment(
                low,
                int(index.shard[number]),
                slice(token, token + high - low),
                slice(row, row + np.count_nonzero(mask)),
                mask,
            )


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
        cls, documents: Documents, schema: FeatureSchema, conf: CaptureConf
    ) -> tuple["CapturePlan", PackReport]:
        """Return the plan and the report of packing documents into rows, in shards of full batches."""
        length = conf.data.row_length
        if conf.data.overlap is None:
            documents = truncate_documents(documents, length)
        packed, report = pack_documents(documents, length, overlap=conf.data.overlap)
        supervised_mask = find_supervised_tokens(documents) | schema.on_prompts
        batches_per_shard = int(conf.shard_mb * MB / (schema.num_bytes(length, length) * conf.batch))
        rows_per_shard = conf.batch * max(1, batches_per_shard)
        index, counts = build_segment_index(packed, supervised_mask, rows_per_shard=rows_per_shard)
        return cls(
            packed=packed,
            schema=schema,
            supervised_mask=supervised_mask,
            segment_index=index,
            shard_token_counts=counts,
            rows_per_shard=rows_per_shard,
        ), report

    def shard_rows(self, shard: int) -> list[int]:
        """List the packed rows that a shard holds."""
        return list(range(len(self.packed))[shard * self.rows_per_shard :][: self.rows_per_shard])

    def stored_positions(self, rows: list[int]) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " supervised"]]:
        """Return the positions, in `rows` laid end to end, of all and of supervised tokens, in the shard's order."""
        positions, supervised = [], []
        for number, row in enumerate(rows):
            right = number * self.packed.length
            for piece in range(*self.packed.starts[row : row + 2].tolist()):
                _, begin, end, _ = self.packed.table[piece].tolist()
                right += end - begin
                # The overlap is stored with the previous piece, so positions count from the right.
                stored = np.arange(right - int(self.segment_index.tokens[piece]), right)
                mask = self.supervised_mask[int(self.segment_index.first[piece]) :][: len(stored)]
                positions.append(stored)
                supervised.append(stored[mask])
        return np.concatenate(positions), np.concatenate(supervised)

    def document_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the documents file, as data/features/reader.py reads them."""
        order = np.argsort(self.segment_index.first)  # for binary search
        arrays = (
            {name: getattr(self.packed.documents, name) for name in DOCUMENT_FIELDS}
            | {f"segments.{name}": values[order] for name, values in vars(self.segment_index).items()}
            | {"supervised": self.supervised_mask}
        )
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}

    @property
    def token_counts(self) -> tuple[int, int]:
        """Return the numbers of all and of supervised tokens."""
        tokens, supervised = self.shard_token_counts.sum(0).tolist()
        return tokens, supervised
