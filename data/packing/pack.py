"""Pack documents into rows of one fixed length: best fit, longest first.

Each piece goes into the row where it leaves the least room, or into a new row. Open rows are grouped by the room left
in them, and a bit set records which rooms occur: placing a piece takes a few bit operations.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from data.packing.documents import Documents, Packed
from models.io.errors import require

MAX_SKIP_REASONS = 5  # most frequent reasons that a report prints
DOCUMENT, BEGIN, END, LOSS_BEGIN = range(4)  # columns of Packed.table


@dataclass(kw_only=True)
class PackReport:
    """Counts of the packed, cut, split and dropped documents, and how full the rows are."""

    documents: int  # packed, whole or in part
    rows: int
    length: int  # tokens of a row
    truncated: int  # documents cut at the end of a row
    split: int  # documents split into several pieces
    dropped: int  # documents without an answer token, or none left after the cut
    fill: float  # share of the rows' positions that hold a token
    repeated: float  # share of the tokens that are the context of a later piece
    supervised: float  # share of the tokens that are answer tokens with a loss
    skipped: dict[str, int]  # rows of the source left out, by reason

    def __str__(self) -> str:
        reasons = Counter(self.skipped).most_common(MAX_SKIP_REASONS)
        skipped = "".join(f"; {count:,} rows skipped: {reason}" for reason, count in reasons)
        if remaining := sum(self.skipped.values()) - sum(count for _, count in reasons):
            skipped += f"; {remaining:,} for other reasons"
        long_documents = (
            f"{self.split:,} split ({self.repeated:.1%} of the tokens repeated)"
            if self.split
            else f"{self.truncated:,} cut"
        )
        return (
            f"{self.documents:,} documents in {self.rows:,} rows of {self.length} tokens "
            f"({self.fill:.1%} filled, {self.supervised:.1%} of the tokens are answers), "
            f"{long_documents}, {self.dropped:,} dropped without an answer that fits{skipped}"
        )


def pack_documents(
    documents: Documents,
    length: int,
    *,
    overlap: int | None = None,
    document_numbers: Int[np.ndarray, " numbers"] | None = None,
) -> tuple[Packed, PackReport]:
    """Pack all documents, or those in `document_numbers`, into rows of `length` tokens.

    The rows depend on nothing else. Later pieces of a long document repeat `overlap` tokens as context; None truncates
    it instead. Raises UserError if no answer token is left.
    """
    numbers = np.arange(len(documents)) if document_numbers is None else document_numbers
    pieces = cut_documents(documents.lengths, numbers, length, overlap)
    answer_tokens = count_piece_answers(documents, pieces)
    pieces, answer_tokens = pieces[answer_tokens > 0], answer_tokens[answer_tokens > 0]
    require(
        len(pieces) > 0,
        f"data.row_length: must reach beyond the prompts, got {length} for {len(numbers)} documents; raise it",
    )
    sizes = pieces[:, END] - pieces[:, BEGIN]
    row = best_fit(sizes, length)
    table, starts = pieces[np.argsort(row, kind="stable")], np.concatenate([[0], np.bincount(row).cumsum()])
    packed = Packed(documents=documents, table=table, starts=starts, length=length, overlap=overlap)
    packed_documents, num_pieces = np.unique(pieces[:, DOCUMENT], return_counts=True)
    too_long = int((documents.lengths[packed_documents] > length).sum())
    tokens = int(sizes.sum())
    return packed, PackReport(
        documents=len(packed_documents),
        rows=len(packed),
        length=length,
        truncated=too_long if overlap is None else 0,
        split=int((num_pieces > 1).sum()),
        dropped=len(numbers) - len(packed_documents),
        fill=tokens / (len(packed) * length),
        repeated=int((pieces[:, LOSS_BEGIN] - pieces[:, BEGIN]).sum()) / tokens,
        supervised=int(answer_tokens.sum()) / tokens,
        skipped=documents.skipped,
    )


def check_positions(documents: Documents, length: int, context: int | None) -> None:
    """Raise UserError if a row of `length` tokens could hold a document past the last position of the target."""
    if context is not None and length > context:
        longer = int((documents.lengths > context).sum())
        require(
            longer == 0,
            f"data.row_length: must be at most the target's {context:,} positions where documents are longer, as "
            f"{longer:,} are, got {length:,}; set data.row_length={context}",
        )


def cut_documents(
    lengths: Int[np.ndarray, " documents"], numbers: Int[np.ndarray, " numbers"], length: int, overlap: int | None
) -> Int[np.ndarray, "pieces 4"]:
    """Cut the numbered documents into pieces of at most `length` tokens.

    Each piece is a row of Packed.table: document, begin, end, loss_begin.

    >>> cut_documents(np.array([9, 25]), np.array([0, 1]), 10, 4).tolist()
    [[0, 0, 9, 0], [1, 0, 10, 0], [1, 6, 16, 10], [1, 12, 22, 16], [1, 18, 25, 22]]
    """
    ends, context = lengths[numbers], overlap or 0
    num_pieces = np.ones_like(ends)
    if overlap is not None:  # `//` rounds the negative excess down, so the pieces are rounded up
        num_pieces -= (length - ends).clip(max=0) // (length - overlap)
    document = np.repeat(np.arange(len(numbers)), num_pieces)
    index = np.arange(len(document)) - np.repeat(num_pieces.cumsum() - num_pieces, num_pieces)
    begin = index * (length - context)
    end = np.minimum(begin + length, ends[document])
    loss_begin = begin + context * (index > 0)
    return np.stack([numbers[document], begin, end, loss_begin], 1).astype(np.int32)


def count_piece_answers(documents: Documents, pieces: Int[np.ndarray, "pieces 4"]) -> Int[np.ndarray, " pieces"]:
    """Count the answer tokens of each piece that have a loss."""
    starts = documents.starts[pieces[:, DOCUMENT]]
    spans = zip((starts + pieces[:, LOSS_BEGIN]).tolist(), (starts + pieces[:, END]).tolist(), strict=True)
    return np.array([np.count_nonzero(documents.answer[b:e]) for b, e in spans], np.int64)


def best_fit(sizes: Int[np.ndarray, " pieces"], length: int) -> Int[np.ndarray, " pieces"]:
    """Assign each piece to a row and return the row of each piece.

    >>> best_fit(np.array([5, 4, 3, 6]), 9).tolist()
    [1, 1, 0, 0]
    """
    rows_by_room: list[list[int]] = [[] for _ in range(length + 1)]  # entry r: rows with room r
    rooms = 0  # bit r is set if a row has room for exactly r tokens
    num_rows, row_of_piece = 0, np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if fitting := rooms >> size:
            # The lowest set bit of `fitting` is the least room that is enough.
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            rooms ^= (not rows_by_room[room]) << room
        else:
            room, row = length, num_rows
            num_rows += 1
        row_of_piece[piece] = row
        if room_left := room - size:
            rows_by_room[room_left].append(row)
            rooms |= 1 << room_left
    return row_of_piece
