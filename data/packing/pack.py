"""Documents packed into rows of one fixed length: best fit, longest first.

Each piece goes into the row whose room it leaves the least of, or into a new one. Rows are counted
by the room that is left in them, so that n pieces take n looks at a few words of bits.

A document longer than a row loses its end; with an overlap it is split instead, and each later
piece begins with the last tokens of the one before, as context that is not learned again.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from data.packing.documents import Documents, Packed
from models.errors import UserError

REASONS = 5  # for skipping rows that a report prints
DOCUMENT, BEGIN, END, LEARNS = range(4)  # columns of Packed.table


@dataclass(kw_only=True)
class PackReport:
    """What became of the documents."""

    documents: int  # packed, whole or in part
    rows: int
    length: int
    truncated: int  # cut at the end of a row
    split: int  # into several pieces
    dropped: int  # without an answer token, or none left after the cut
    fill: float  # share of the rows' positions that hold a token
    repeated: float  # share of the tokens that are the context of a later piece
    supervised: float  # share of the tokens that are answer tokens to be learned
    skipped: dict[str, int] = field(default_factory=dict)  # rows of the source left out, by reason

    def __str__(self) -> str:
        reasons = Counter(self.skipped).most_common(REASONS)
        skipped = "".join(f"; {count:,} rows skipped: {why}" for why, count in reasons)
        if others := sum(self.skipped.values()) - sum(count for _, count in reasons):
            skipped += f"; {others:,} for other reasons"
        long = f"{self.truncated:,} cut"
        if self.split:
            long = f"{self.split:,} split ({self.repeated:.1%} of the tokens repeated)"
        return (
            f"{self.documents:,} documents in {self.rows:,} rows of {self.length} tokens "
            f"({self.fill:.1%} filled, {self.supervised:.1%} of the tokens are answers), "
            f"{long}, {self.dropped:,} dropped without an answer{skipped}"
        )


def pack(
    documents: Documents, length: int, *, overlap: int | None = None, pad_id: int = 0,
    among: Int[np.ndarray, " chosen"] | None = None,
) -> tuple[Packed, PackReport]:  # fmt: skip
    """All documents, or those `among` them, as rows: a pure function of them.

    `overlap`: the tokens that a later piece of a long document repeats; None cuts it at the end.
    """
    chosen = np.arange(len(documents)) if among is None else among
    pieces = cut(documents.lengths, chosen, length, overlap)
    learned = answers_in(documents, pieces)
    pieces, learned = pieces[learned > 0], learned[learned > 0]
    if not len(pieces):
        raise UserError(
            f"data.length: must reach beyond the prompts, got {length}, which leaves no answer "
            f"token in {len(chosen)} documents; raise it"
        )
    sizes = pieces[:, END] - pieces[:, BEGIN]
    row = best_fit(sizes, length)
    packed = Packed(
        documents=documents, table=pieces[np.argsort(row, kind="stable")],
        starts=np.concatenate([[0], np.bincount(row).cumsum()]), length=length, pad_id=pad_id,
        overlap=overlap,
    )  # fmt: skip
    kept, parts = np.unique(pieces[:, DOCUMENT], return_counts=True)
    too_long = int((documents.lengths[kept] > length).sum())
    tokens = int(sizes.sum())
    return packed, PackReport(
        documents=len(kept),
        rows=len(packed),
        length=length,
        truncated=too_long if overlap is None else 0,
        split=int((parts > 1).sum()),
        dropped=len(chosen) - len(kept),
        fill=tokens / (len(packed) * length),
        repeated=int((pieces[:, LEARNS] - pieces[:, BEGIN]).sum()) / tokens,
        supervised=int(learned.sum()) / tokens,
    )


def cut(
    lengths: Int[np.ndarray, " documents"], chosen: Int[np.ndarray, " chosen"], length: int,
    overlap: int | None,
) -> Int[np.ndarray, "pieces 4"]:  # fmt: skip
    """The documents' pieces, as the rows of Packed.table: what each has of a document.

    >>> cut(np.array([9, 25]), np.array([0, 1]), 10, 4).tolist()
    [[0, 0, 9, 0], [1, 0, 10, 0], [1, 6, 16, 10], [1, 12, 22, 16], [1, 18, 25, 22]]
    """
    ends, again = lengths[chosen], overlap or 0
    parts = np.ones_like(ends)
    if overlap is not None:  # whole steps beyond the first row, rounded up
        parts -= (length - ends).clip(max=0) // (length - overlap)
    document = np.repeat(np.arange(len(chosen)), parts)
    place = np.arange(len(document)) - np.repeat(parts.cumsum() - parts, parts)
    begin = place * (length - again)
    end = np.minimum(begin + length, ends[document])
    learns = begin + again * (place > 0)
    return np.stack([chosen[document], begin, end, learns], 1).astype(np.int32)


def answers_in(
    documents: Documents, pieces: Int[np.ndarray, "pieces 4"]
) -> Int[np.ndarray, " pieces"]:
    """How many answer tokens each piece has to teach."""
    starts = documents.starts[pieces[:, DOCUMENT]]
    spans = zip(
        (starts + pieces[:, LEARNS]).tolist(), (starts + pieces[:, END]).tolist(), strict=True
    )
    counts = (np.count_nonzero(documents.answer[begin:end]) for begin, end in spans)
    return np.fromiter(counts, np.int64, len(pieces))


def best_fit(sizes: Int[np.ndarray, " pieces"], length: int) -> Int[np.ndarray, " pieces"]:
    """The row that each piece goes to.

    >>> best_fit(np.array([5, 4, 3, 6]), 9).tolist()
    [1, 1, 0, 0]
    """
    rows_left: list[list[int]] = [[] for _ in range(length + 1)]  # by the room that is left in them
    rooms = 0  # bit r is set where some row has room for r tokens
    rows, of_piece = 0, np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_left[room].pop()
            rooms ^= (not rows_left[room]) << room
        else:
            room, row = length, rows
            rows += 1
        of_piece[piece] = row
        if left := room - size:
            rows_left[left].append(row)
            rooms |= 1 << left
    return of_piece
