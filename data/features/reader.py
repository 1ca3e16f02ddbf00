"""A feature store, read: what the target computed once, for as many runs and ranks as like.

Every file is mapped into memory: nothing is read before it is asked for, and processes on one
machine share what has been. Layout and guarantees: docs/features.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.features import manifest as store_manifest
from data.features.index import Runs, Stretch, stretches
from data.features.manifest import DOCUMENTS, Manifest, shard_name
from data.features.plan import HELD
from data.features.quantize import dequantise, widened
from data.features.schema import SCALE, TeacherKind
from data.packing.documents import Documents, Piece
from models.distill.topk_logits import TopK
from models.drafts.base import Needs
from models.errors import UserError
from models.target.language_model import Seen

AT_ONCE = 32  # rows of hidden states
RUNS = list(Runs.__annotations__)
INDEXED = [*HELD, "supervised", *(f"runs.{name}" for name in RUNS)]  # of DOCUMENTS


@dataclass(kw_only=True)
class _Read:
    """What some rows hold: where it lies in the store, and where it goes in rows end to end."""

    stretches: list[Stretch]
    tokens: Int[Tensor, " tokens"]
    supervised: Int[Tensor, " supervised"]
    shape: tuple[int, int]


class Store:
    """Documents, and the target's view of each of their tokens."""

    def __init__(self, folder: Path, manifest: Manifest, needs: Needs, dtype: torch.dtype):
        self.manifest, self.needs, self.dtype = manifest, needs, dtype
        self.parts = {part.name: part for part in manifest.made.layout.parts}
        held = {name: t.numpy() for name, t in self._mapped(folder, DOCUMENTS, INDEXED).items()}
        self.runs = Runs(**{name: held.pop(f"runs.{name}") for name in RUNS})
        self.supervised: Bool[np.ndarray, " tokens"] = held.pop("supervised")
        self.documents = Documents(
            **held, categories=manifest.categories, languages=manifest.languages
        )
        names = [shard_name(number) for number in range(manifest.made.shards)]
        self.shards = [self._mapped(folder, name, list(self.parts)) for name in names]

    @classmethod
    def open(
        cls, path: str | Path, *, target_hash: str, tokenizer_hash: str, needs: Needs,
        dtype: torch.dtype = torch.float32, checksums: bool = True,
    ) -> "Store":  # fmt: skip
        """A whole store of this target that has what a method needs, else a UserError.

        Features are given in `dtype`. `checksums`: read every file and compare, else sizes alone.
        """
        folder = Path(path)
        manifest = store_manifest.read(folder)
        refuse_others(manifest, folder, tokenizer_hash=tokenizer_hash, needs=needs)
        if manifest.made.target_sha256 != target_hash:
            found = manifest.made.target_sha256
            raise _other(manifest, folder, "target", found[:12], target_hash[:12])
        manifest.refuse_damaged(folder, checksums=checksums)
        return cls(folder, manifest, needs, dtype)

    def _mapped(self, folder: Path, file: str, names: list[str]) -> dict[str, Tensor]:
        """Tensors of a file, of which nothing is read yet."""
        try:
            with safe_open(folder / file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in names}
        except SafetensorError as error:  # what checksums would have found
            raise self.manifest.spoilt(folder, file, f"changed: {error}") from error

    def seen(self, rows: list[list[Piece]], length: int) -> Seen:
        """Of packed rows, on the host. What is not stored is 0, and weighs nothing in any loss."""
        found, layout = self._find(rows, length), self.manifest.made.layout
        teacher = self._teacher(found) if layout.teacher is TeacherKind.topk else None
        none = torch.zeros(*found.shape, 0, dtype=self.dtype)
        return Seen(
            captured=self._states("captured", found) if self.needs.layers else none,
            hidden=self._states("hidden", found) if self.needs.hidden or not teacher else none,
            teacher=teacher,
        )

    def _find(self, rows: list[list[Piece]], length: int) -> _Read:
        found, tokens, supervised = [], [], []
        for number, row in enumerate(rows):
            place = number * length
            for piece in row:
                start = int(self.documents.starts[piece.document])
                begin, end = start + piece.begin, start + piece.end
                for one in stretches(self.runs, self.supervised, begin, end):
                    here = np.arange(len(one.supervised)) + (place + one.first - begin)
                    found.append(one)
                    tokens.append(here)
                    supervised.append(here[one.supervised])
                place += piece.end - piece.begin
        return _Read(
            stretches=found, shape=(len(rows), length),
            tokens=torch.from_numpy(np.concatenate(tokens)),
            supervised=torch.from_numpy(np.concatenate(supervised)),
        )  # fmt: skip

    def _states(self, name: str, found: _Read) -> Float[Tensor, "rows length width"]:
        """Hidden states, as many as a token has side by side.

        A few rows at a time: what lies between stays in the processor's cache.
        """
        part, left = self.parts[name], 0
        places = (found.tokens if part.every else found.supervised).numpy()
        room = zeros(math.prod(found.shape), math.prod(part.shape), dtype=self.dtype)
        for one in found.stretches:
            shard, rows = self.shards[one.shard], one.tokens if part.every else one.rows
            right = left + rows.stop - rows.start
            for some, here in together(rows.start, places[left:right]):
                scale = shard[name + SCALE][some] if name + SCALE in shard else None
                room[here] = dequantise(widened(shard[name][some]), scale).flatten(1)
            left = right
        return room.unflatten(0, found.shape)

    def _teacher(self, found: _Read) -> TopK:
        """Where nothing is stored, any distribution: its loss must be finite to weigh nothing."""
        k = self.manifest.made.layout.top_k
        fill = {"ids": torch.arange(k), "log_probs": -math.log(2 * k), "rest": 0.5}
        kinds = {"ids": torch.int64, "log_probs": torch.float32, "rest": torch.float32}
        read = {
            name: self._spread(
                f"teacher.{name}", self._values(f"teacher.{name}", found).to(kinds[name]),
                found, value,
            )
            for name, value in fill.items()
        }  # fmt: skip
        return TopK(**read, vocab=self.manifest.made.layout.vocab_size)

    def _values(self, name: str, found: _Read) -> Tensor:
        """Rows of a part, as stored."""
        every = self.parts[name].every
        return torch.cat(
            [
                self.shards[one.shard][name][one.tokens if every else one.rows]
                for one in found.stretches
            ]
        )

    def _spread(self, name: str, rows: Tensor, found: _Read, fill: Any) -> Tensor:
        """Each row of a part to its token's place."""
        shape = (math.prod(found.shape), *rows.shape[1:])
        room = torch.empty(shape, dtype=rows.dtype)
        room[:] = fill
        room.index_copy_(0, found.tokens if self.parts[name].every else found.supervised, rows)
        return room.unflatten(0, found.shape)


def zeros(rows: int, width: int, *, dtype: torch.dtype) -> Float[Tensor, "rows width"]:
    """By numpy, which asks Linux for huge pages: small ones cost more than what fills them."""
    return torch.from_numpy(np.zeros((rows, width * dtype.itemsize), np.uint8)).view(dtype)


def together(first: int, places: Int[np.ndarray, " rows"]) -> Iterator[tuple[slice, slice]]:
    """Rows of a shard from `first` on, and the places they go to: both without a gap.

    >>> list(together(5, np.array([2, 3, 7])))
    [(slice(5, 7, None), slice(2, 4, None)), (slice(7, 8, None), slice(7, 8, None))]
    """
    gaps = (np.flatnonzero(np.diff(places) != 1) + 1).tolist()
    for begin, end in pairwise([0, *gaps, len(places)]):
        for low in range(begin, end, AT_ONCE):
            count, place = min(AT_ONCE, end - low), int(places[low])
            yield slice(first + low, first + low + count), slice(place, place + count)


def refuse_others(
    manifest: Manifest, folder: Path, *, needs: Needs, tokenizer_hash: str | None = None,
    hidden_size: int | None = None,
) -> None:  # fmt: skip
    """What can be known before the target's weights are: raises UserError for another's store."""
    made = manifest.made
    manifest.refuse_unfinished(folder)
    if tokenizer_hash not in (None, made.tokenizer_sha256):
        raise _other(manifest, folder, "tokenizer", made.tokenizer_sha256[:12], tokenizer_hash[:12])
    if hidden_size not in (None, made.layout.hidden_size):
        raise _other(
            manifest, folder, "target", f"hidden size {made.layout.hidden_size}",
            f"hidden size {hidden_size}",
        )  # fmt: skip
    if lacking := made.layout.lacks(needs):
        raise UserError(
            f"data.path: must hold what the draft reads, {lacking} in {folder}, captured for "
            f"{manifest.method}; capture again for this draft under another run_name"
        )


def _other(manifest: Manifest, folder: Path, what: str, found: str, wanted: str) -> UserError:
    return UserError(
        f"data.path: must be a store of this {what} ({wanted}), got {folder} of another ({found}, "
        f"captured from {manifest.target}); capture again for this {what} under another run_name"
    )
