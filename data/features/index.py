"""Where in a feature store the features of each token lie.

Documents keep the order that they came in; the target looks at them packed into rows, and a shard
holds the tokens of so many rows one after another.

    documents    0 0 0 0 0 1 1 1 2 2 2 2 2 2      a run: tokens that lie together, in both
    row 0        2 2 2 2 2 2 1 1 1                shard 0 = rows 0, 1, ...
    row 1        0 0 0 0 0

A document is one run. One that was split is several: a token that two pieces share is stored with
the earlier one, which has seen more of what comes before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from data.packing.documents import Documents, Packed
from data.packing.pack import BEGIN, DOCUMENT, END


@dataclass(kw_only=True)
class Runs:
    """Stretches of tokens, and where their features begin in their shard."""

    first: Int[np.ndarray, " runs"]  # int64: place of the first token among those of all documents
    tokens: Int[np.ndarray, " runs"]  # int32
    shard: Int[np.ndarray, " runs"]  # int32
    token: Int[np.ndarray, " runs"]  # int64: its row among those that every token has
    row: Int[np.ndarray, " runs"]  # int64: its row among those of supervised tokens

    def ordered(self) -> "Runs":
        """By their tokens' place, so that they can be searched."""
        order = np.argsort(self.first)
        return Runs(**{name: values[order] for name, values in vars(self).items()})


def supervised(documents: Documents) -> Bool[np.ndarray, " tokens"]:
    """Tokens of an answer, and those whose next token is: a method learns from no others.

    >>> from data.conversations import Tokenised
    >>> one = Tokenised(ids=[1, 2, 3, 4], answer=[False, False, True, False])
    >>> two = Tokenised(ids=[5, 6], answer=[True, False])
    >>> supervised(Documents.of([one, two])).astype(int)
    array([0, 1, 1, 0, 1, 0])
    """
    flags = documents.answer.copy()
    flags[:-1] |= documents.answer[1:]
    last = documents.starts[1:] - 1
    flags[last] = documents.answer[last]  # what follows is another document's
    return flags


def shortened(documents: Documents, length: int) -> Documents:
    """Without what lies beyond `length` tokens of each."""
    if documents.lengths.max(initial=0) <= length:
        return documents
    kept = np.minimum(documents.lengths, length)
    spans = zip(documents.starts[:-1].tolist(), kept.tolist(), strict=True)
    places = [slice(start, start + count) for start, count in spans]
    return replace(
        documents,
        ids=np.concatenate([documents.ids[place] for place in places]),
        answer=np.concatenate([documents.answer[place] for place in places]),
        starts=np.concatenate([[0], kept.cumsum()]),
    )


def runs_of(
    packed: Packed, flags: Bool[np.ndarray, " tokens"], *, rows_a_shard: int
) -> tuple[Runs, Int[np.ndarray, "shards 2"]]:
    """One run for each piece, row after row; tokens and supervised tokens of each shard."""
    document, begin, end = packed.table[:, [DOCUMENT, BEGIN, END]].astype(np.int64).T
    begin = np.maximum(begin, _ends_before(document, begin, end))
    first = packed.documents.starts[document] + begin
    spans = zip(first.tolist(), (first + end - begin).tolist(), strict=True)
    taught = (np.count_nonzero(flags[one:other]) for one, other in spans)
    sizes = np.stack([end - begin, np.fromiter(taught, np.int64, len(first))], 1)

    row = np.repeat(np.arange(len(packed)), np.diff(packed.starts))
    shard = row // rows_a_shard
    totals = np.zeros((int(shard[-1]) + 1, 2), np.int64)
    np.add.at(totals, shard, sizes)
    offsets = sizes.cumsum(0) - sizes - (totals.cumsum(0) - totals)[shard]
    runs = Runs(
        first=first, tokens=sizes[:, 0].astype(np.int32), shard=shard.astype(np.int32),
        token=offsets[:, 0], row=offsets[:, 1],
    )  # fmt: skip
    return runs, totals


def _ends_before(
    document: Int[np.ndarray, " pieces"], begin: Int[np.ndarray, " pieces"],
    end: Int[np.ndarray, " pieces"],
) -> Int[np.ndarray, " pieces"]:  # fmt: skip
    """Where the piece before, of the same document, ends; 0 for its first."""
    order = np.lexsort((begin, document))
    same = document[order][1:] == document[order][:-1]
    before = np.zeros_like(end)
    before[order[1:]] = end[order][:-1] * same
    return before


class Stretch(NamedTuple):
    """Tokens that lie together, in the documents and in a shard."""

    first: int  # among the tokens of all documents
    shard: int
    tokens: slice  # of the parts that every token has
    rows: slice  # of the parts of supervised tokens
    supervised: Bool[np.ndarray, " tokens"]


def stretches(
    runs: Runs, flags: Bool[np.ndarray, " tokens"], begin: int, end: int
) -> Iterator[Stretch]:
    """What is stored of tokens [begin, end), from left to right."""
    left = max(int(runs.first.searchsorted(begin, "right")) - 1, 0)
    for run in range(left, int(runs.first.searchsorted(end))):
        first, count = int(runs.first[run]), int(runs.tokens[run])
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            token = int(runs.token[run]) + low - first
            row = int(runs.row[run]) + int(np.count_nonzero(flags[first:low]))
            some = flags[low:high]
            yield Stretch(
                low, int(runs.shard[run]), slice(token, token + high - low),
                slice(row, row + np.count_nonzero(some)), some,
            )  # fmt: skip
