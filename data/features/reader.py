"""Reader of a feature store: the target's features, computed once and shared by runs and ranks.

Every file is mapped into memory: pages are read on first access, and the processes of one machine
share them. File format and guarantees: docs/features.md.
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
from data.features.index import Segment, SegmentIndex, find_segments
from data.features.manifest import DOCUMENTS_FILE, Manifest, shard_name
from data.features.plan import DOCUMENT_FIELDS
from data.features.quantize import dequantize, widen_fp8
from data.features.schema import SCALE_SUFFIX, TeacherKind
from data.packing.documents import DocumentPiece, Documents
from models.distill.topk_logits import TopKLogits
from models.drafts.base import Needs
from models.errors import UserError
from models.target.language_model import TargetOutput

CHUNK_ROWS = 32  # rows of hidden states dequantized at a time
SEGMENT_FIELDS = list(SegmentIndex.__annotations__)
DOCUMENT_TENSORS = [  # of the documents file
    *DOCUMENT_FIELDS,
    "supervised",
    *(f"runs.{name}" for name in SEGMENT_FIELDS),
]


@dataclass(kw_only=True)
class _RowLocations:
    """The stored segments of packed rows, and their positions in the rows laid end to end."""

    segments: list[Segment]
    token_positions: Int[Tensor, " token_positions"]
    supervised_positions: Int[Tensor, " supervised_positions"]
    shape: tuple[int, int]


class FeatureStore:
    """A store's documents, and the target's features of their tokens."""

    def __init__(self, folder: Path, manifest: Manifest, needs: Needs, dtype: torch.dtype):
        self.manifest, self.needs, self.dtype = manifest, needs, dtype
        self.tensor_specs = {spec.name: spec for spec in manifest.made.layout.tensor_specs}
        arrays = {
            name: t.numpy()
            for name, t in self._map_tensors(folder, DOCUMENTS_FILE, DOCUMENT_TENSORS).items()
        }
        self.segment_index = SegmentIndex(
            **{name: arrays.pop(f"runs.{name}") for name in SEGMENT_FIELDS}
        )
        self.supervised_mask: Bool[np.ndarray, " tokens"] = arrays.pop("supervised")
        self.documents = Documents(
            **arrays, categories=manifest.categories, languages=manifest.languages
        )
        names = [shard_name(number) for number in range(manifest.made.shards)]
        self.shards = [self._map_tensors(folder, name, list(self.tensor_specs)) for name in names]

    @classmethod
    def open(
        cls, path: str | Path, *, target_hash: str, tokenizer_hash: str, needs: Needs,
        dtype: torch.dtype = torch.float32, checksums: bool = True,
    ) -> "FeatureStore":  # fmt: skip
        """Open a finished store of this target that has the features in `needs`.

        Features are returned in `dtype`. With `checksums` every file is hashed, otherwise only the
        sizes are compared. Raises UserError for an unfinished, damaged or unsuitable store.
        """
        folder = Path(path)
        manifest = store_manifest.read_manifest(folder)
        check_manifest(manifest, folder, tokenizer_hash=tokenizer_hash, needs=needs)
        if manifest.made.target_sha256 != target_hash:
            stored_hash = manifest.made.target_sha256
            raise _mismatch_error(manifest, folder, "target", stored_hash[:12], target_hash[:12])
        manifest.check_undamaged(folder, checksums=checksums)
        return cls(folder, manifest, needs, dtype)

    def _map_tensors(self, folder: Path, file: str, names: list[str]) -> dict[str, Tensor]:
        """Map tensors of a file into memory without reading them."""
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                return {name: tensors.get_tensor(name) for name in names}
        except SafetensorError as error:  # damage that a comparison of sizes does not detect
            raise self.manifest.damaged_error(folder, file, f"changed: {error}") from error

    def read_target_output(self, rows: list[list[DocumentPiece]], length: int) -> TargetOutput:
        """Read the target output of packed rows of `length` positions on the host.

        Positions that are not stored are 0; they have no weight in any loss.
        """
        locations, schema = self._locate_rows(rows, length), self.manifest.made.layout
        topk = self._read_topk_logits(locations) if schema.teacher is TeacherKind.topk else None
        empty = torch.zeros(*locations.shape, 0, dtype=self.dtype)
        return TargetOutput(
            captured=self._read_hidden_states("captured", locations)
            if self.needs.layers
            else empty,
            hidden=self._read_hidden_states("hidden", locations)
            if self.needs.hidden or not topk
            else empty,
            topk=topk,
        )

    def _locate_rows(self, rows: list[list[DocumentPiece]], length: int) -> _RowLocations:
        segments, tokens, supervised = [], [], []
        for number, row in enumerate(rows):
            offset = number * length
            for piece in row:
                start = int(self.documents.starts[piece.document])
                begin, end = start + piece.begin, start + piece.end
                for segment in find_segments(self.segment_index, self.supervised_mask, begin, end):
                    positions = np.arange(len(segment.supervised_mask)) + (
                        offset + segment.first - begin
                    )
                    segments.append(segment)
                    tokens.append(positions)
                    supervised.append(positions[segment.supervised_mask])
                offset += piece.end - piece.begin
        return _RowLocations(
            segments=segments, shape=(len(rows), length),
            token_positions=torch.from_numpy(np.concatenate(tokens)),
            supervised_positions=torch.from_numpy(np.concatenate(supervised)),
        )  # fmt: skip

    def _read_hidden_states(
        self, name: str, locations: _RowLocations
    ) -> Float[Tensor, "rows length width"]:
        """Read and dequantize hidden states, those of a token's layers side by side.

        Rows are read in small chunks so that the intermediate values stay in the processor's cache.
        """
        spec, left = self.tensor_specs[name], 0
        positions = (
            locations.token_positions if spec.per_token else locations.supervised_positions
        ).numpy()
        output = allocate_zeros(math.prod(locations.shape), math.prod(spec.shape), dtype=self.dtype)
        for segment in locations.segments:
            shard, rows = (
                self.shards[segment.shard],
                segment.token_rows if spec.per_token else segment.supervised_rows,
            )
            right = left + rows.stop - rows.start
            for source, destination in split_contiguous(rows.start, positions[left:right]):
                scale = shard[name + SCALE_SUFFIX][source] if name + SCALE_SUFFIX in shard else None
                output[destination] = dequantize(widen_fp8(shard[name][source]), scale).flatten(1)
            left = right
        return output.unflatten(0, locations.shape)

    def _read_topk_logits(self, locations: _RowLocations) -> TopKLogits:
        """Read the top-k logits of rows.

        Positions that are not stored get a valid distribution: a loss that is not finite would
        stay so when multiplied by its weight of 0.
        """
        k = self.manifest.made.layout.top_k
        fill = {"ids": torch.arange(k), "log_probs": -math.log(2 * k), "rest": 0.5}
        dtypes = {"ids": torch.int64, "log_probs": torch.float32, "rest": torch.float32}
        tensors = {
            name: self._scatter_rows(
                f"teacher.{name}",
                self._read_values(f"teacher.{name}", locations).to(dtypes[name]),
                locations, value,
            )
            for name, value in fill.items()
        }  # fmt: skip
        return TopKLogits(**tensors, vocab_size=self.manifest.made.layout.vocab_size)

    def _read_values(self, name: str, locations: _RowLocations) -> Tensor:
        """Read the rows of a tensor as they are stored."""
        per_token = self.tensor_specs[name].per_token
        return torch.cat(
            [
                self.shards[segment.shard][name][
                    segment.token_rows if per_token else segment.supervised_rows
                ]
                for segment in locations.segments
            ]
        )

    def _scatter_rows(
        self, name: str, values: Tensor, locations: _RowLocations, fill: Any
    ) -> Tensor:
        """Copy the rows of a tensor to their tokens' positions; the others are `fill`."""
        shape = (math.prod(locations.shape), *values.shape[1:])
        output = torch.empty(shape, dtype=values.dtype)
        output[:] = fill
        output.index_copy_(
            0,
            locations.token_positions
            if self.tensor_specs[name].per_token
            else locations.supervised_positions,
            values,
        )
        return output.unflatten(0, locations.shape)


def allocate_zeros(rows: int, width: int, *, dtype: torch.dtype) -> Float[Tensor, "rows width"]:
    """Allocate zeros with numpy, which uses huge pages on Linux.

    Page faults on small pages cost more time than filling the tensor.
    """
    return torch.from_numpy(np.zeros((rows, width * dtype.itemsize), np.uint8)).view(dtype)


def split_contiguous(
    first: int, positions: Int[np.ndarray, " rows"]
) -> Iterator[tuple[slice, slice]]:
    """Split shard rows from `first` on into chunks whose destinations are contiguous too.

    >>> list(split_contiguous(5, np.array([2, 3, 7])))
    [(slice(5, 7, None), slice(2, 4, None)), (slice(7, 8, None), slice(7, 8, None))]
    """
    gaps = (np.flatnonzero(np.diff(positions) != 1) + 1).tolist()
    for begin, end in pairwise([0, *gaps, len(positions)]):
        for low in range(begin, end, CHUNK_ROWS):
            count, position = min(CHUNK_ROWS, end - low), int(positions[low])
            yield slice(first + low, first + low + count), slice(position, position + count)


def check_manifest(
    manifest: Manifest, folder: Path, *, needs: Needs, tokenizer_hash: str | None = None,
    hidden_size: int | None = None,
) -> None:  # fmt: skip
    """Check a store as far as possible without the target's weights.

    Raise UserError if it is unfinished, is of another target, or lacks what a draft needs.
    """
    spec = manifest.made
    manifest.check_finished(folder)
    if tokenizer_hash not in (None, spec.tokenizer_sha256):
        raise _mismatch_error(
            manifest, folder, "tokenizer", spec.tokenizer_sha256[:12], tokenizer_hash[:12]
        )
    if hidden_size not in (None, spec.layout.hidden_size):
        raise _mismatch_error(
            manifest, folder, "target", f"hidden size {spec.layout.hidden_size}",
            f"hidden size {hidden_size}",
        )  # fmt: skip
    if missing := spec.layout.describe_missing(needs):
        raise UserError(
            f"data.path: must hold what the draft reads, {missing} in {folder}, captured for "
            f"{manifest.method}; capture again for this draft under another run_name"
        )


def _mismatch_error(
    manifest: Manifest, folder: Path, kind: str, actual: str, expected: str
) -> UserError:
    return UserError(
        f"data.path: must be a store of this {kind} ({expected}), got {folder}, which is for a "
        f"different one ({actual}, captured from {manifest.target}); capture again for this {kind} "
        "under another run_name"
    )
