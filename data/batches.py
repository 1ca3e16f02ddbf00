"""Documents packed into rows of one fixed length, and the order in which training visits them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.config import DataConf
from data.conversations import Tokenised
from data.tokens import documents
from models.drafts.base import Batch
from models.errors import UserError

WINDOW = 2048  # documents packed together: enough to fill rows, few enough to search
REASONS = 5  # for skipping rows that a report prints


@dataclass(kw_only=True)
class Packed(Batch):
    """All rows of the training data."""

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: list[int]) -> Batch:
        """Some of the rows."""
        return Batch(**{f.name: getattr(self, f.name)[rows] for f in fields(Batch)})


@dataclass(kw_only=True)
class PackReport:
    """What became of the documents."""

    documents: int  # packed
    rows: int
    length: int
    truncated: int  # cut at the end of a row
    dropped: int  # without an answer token, or none left after the cut
    fill: float  # share of the rows' positions that hold a token
    supervised: float  # share of the tokens that are answer tokens
    skipped: dict[str, int] = field(default_factory=dict)  # rows of the source left out, by reason

    def __str__(self) -> str:
        reasons = Counter(self.skipped).most_common(REASONS)
        skipped = "".join(f"; {count:,} rows skipped: {why}" for why, count in reasons)
        if others := sum(self.skipped.values()) - sum(count for _, count in reasons):
            skipped += f"; {others:,} for other reasons"
        return (
            f"{self.documents:,} documents in {self.rows:,} rows of {self.length} tokens "
            f"({self.fill:.1%} filled, {self.supervised:.1%} of the tokens are answers), "
            f"{self.truncated:,} cut, {self.dropped:,} dropped without an answer{skipped}"
        )


def prepare(
    conf: DataConf, tokenizer: PreTrainedTokenizerBase, *, pad_id: int = 0
) -> tuple[Packed, PackReport]:
    """Read, tokenise and pack the data of the conf."""
    skipped: Counter[str] = Counter()
    progress = tqdm(
        documents(conf, tokenizer, skipped), desc="tokenise", unit=" documents", disable=None
    )
    batch, report = pack(iter(progress), length=conf.length, pad_id=pad_id)
    report.skipped = dict(skipped)
    return batch, report


class _Row:
    """A row that is being filled."""

    def __init__(self) -> None:
        self.documents: list[Tokenised] = []
        self.used = 0

    def add(self, document: Tokenised) -> None:
        self.documents.append(document)
        self.used += len(document.ids)

    def batch(self, length: int, pad_id: int) -> Batch:
        """One row. Padding has position 0, document -1 and no answer."""
        padding = length - self.used
        ids, answer, number, positions = [], [], [], []
        for index, document in enumerate(self.documents):
            ids += document.ids
            answer += document.answer
            number += [index] * len(document.ids)
            positions += range(len(document.ids))
        return Batch(
            ids=torch.tensor(ids + [pad_id] * padding)[None],
            answer=torch.tensor(answer + [False] * padding)[None],
            document=torch.tensor(number + [-1] * padding)[None],
            positions=torch.tensor(positions + [0] * padding)[None],
        )


def pack(pieces: Iterable[Tokenised], *, length: int, pad_id: int = 0) -> tuple[Packed, PackReport]:
    """First fit, longest first, a window of documents at a time; no document is split.

    A document longer than a row loses its end. One without an answer token is dropped.
    """
    count: Counter[str] = Counter()
    fitted = _fitting(pieces, length, count)
    full_rows: list[Batch] = []
    while window := list(islice(fitted, WINDOW)):
        full_rows += [row.batch(length, pad_id) for row in _first_fit(window, length)]
    _refuse(count, length)
    report = PackReport(
        documents=count["seen"] - count["dropped"],
        rows=len(full_rows),
        length=length,
        truncated=count["truncated"],
        dropped=count["dropped"],
        fill=count["tokens"] / (len(full_rows) * length),
        supervised=count["answers"] / count["tokens"],
    )
    return _join(full_rows), report


def _fitting(pieces: Iterable[Tokenised], length: int, count: Counter[str]) -> Iterator[Tokenised]:
    """The documents cut to the length of a row, those without an answer left out; all counted."""
    for piece in pieces:
        fitted = Tokenised(ids=piece.ids[:length], answer=piece.answer[:length])
        learns = any(fitted.answer)
        count["seen"] += 1
        count["silent"] += not any(piece.answer)
        count["only answer"] += bool(piece.ids) and all(piece.answer)
        count["dropped"] += not learns
        if learns:
            count["truncated"] += len(piece.ids) > length
            count["tokens"] += len(fitted.ids)
            count["answers"] += sum(fitted.answer)
            yield fitted


def _first_fit(window: list[Tokenised], length: int) -> list[_Row]:
    rows: list[_Row] = []
    for piece in sorted(window, key=lambda piece: len(piece.ids), reverse=True):
        row = next((row for row in rows if row.used + len(piece.ids) <= length), None)
        if row is None:
            row = _Row()
            rows.append(row)
        row.add(piece)
    return rows


def _refuse(count: Counter[str], length: int) -> None:
    """Masks that would train nothing, or the prompts as well."""
    if not count["seen"]:
        raise UserError("data: must hold a document, got none; check data.path and data.limit")
    if count["silent"] == count["seen"]:
        raise UserError(
            f"data: must hold answer tokens, got none in {count['seen']} documents; check the chat "
            "template (its {% generation %} marks) or the answer flags"
        )
    if count["only answer"] == count["seen"]:
        raise UserError(
            f"data: must hold prompts too, got only answer tokens in {count['seen']} documents; "
            "check the chat template (its {% generation %} marks) or the answer flags"
        )
    if count["dropped"] == count["seen"]:
        raise UserError(
            f"data.length: must reach beyond the prompts, got {length}, which leaves no answer "
            f"token in {count['seen']} documents; raise it"
        )


def _join(rows: list[Batch]) -> Packed:
    names = [f.name for f in fields(Batch)]
    return Packed(**{name: torch.cat([getattr(row, name) for row in rows]) for name in names})


@dataclass(kw_only=True, frozen=True)
class Order:
    """Which rows a step trains on: a pure function of the step, so resuming needs nothing else.

    Every epoch visits each row once, in an order of its own. Batches are always full: one that
    meets the end of an epoch goes on with the next.
    """

    rows: int
    batch_size: int  # rows of an optimizer step, over all ranks and accumulated batches
    seed: int

    def batch(self, step: int, rank: int = 0, world: int = 1) -> list[int]:
        """Rows of this rank's share of the step."""
        if self.batch_size % world:
            raise UserError(
                "optim.batch_size: the rows of a step must be a multiple of the processes, "
                f"got {self.batch_size} for {world}"
            )
        visits = range(step * self.batch_size, (step + 1) * self.batch_size)[rank::world]
        return [
            int(_shuffled(self.rows, self.seed, visit // self.rows)[visit % self.rows])
            for visit in visits
        ]


@lru_cache(maxsize=4)
def _shuffled(rows: int, seed: int, epoch: int) -> np.ndarray:
    # a pair, not a sum: seed 1 must not repeat the epochs of seed 0
    return np.random.default_rng([seed, epoch]).permutation(rows)


def answer_counts(batch: Batch, vocab_size: int) -> Int[Tensor, " vocab"]:
    """How often each token occurs in the answers."""
    if (largest := int(batch.ids.max())) >= vocab_size:
        raise UserError(
            f"data: token ids must be below the target's vocabulary of {vocab_size}, "
            f"got {largest}; tokenise with the target's own tokenizer"
        )
    return torch.bincount(batch.ids[batch.answer], minlength=vocab_size)
