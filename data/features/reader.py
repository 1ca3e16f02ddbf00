"""Reader of a feature store: the target's features, computed once, mapped into memory (docs/features.md)."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.config import TeacherKind
from data.features.manifest import DOCUMENTS_FILE, read_manifest, shard_name
from data.features.plan import DOCUMENT_FIELDS, Segment, SegmentIndex, find_segments
from data.features.schema import SCALE_SUFFIX, dequantize, widen_fp8
from data.packing.documents import DocumentPiece, Documents
from models.drafts.base import Needs
from models.losses.distributions import TopKLogits
from models.targets.language_model import TargetOutput

# Segments of packed rows, each with the positions of its tokens in the rows laid end to end.
LocatedSegments = list[tuple[Segment, Int[np.ndarray, " _"]]]
CHUNK_ROWS = 32  # rows of hidden states dequantized at a time, so few that they stay in the processor's cache
SEGMENT_FIELDS = list(SegmentIndex.__annotations__)
DOCUMENT_TENSORS = [*DOCUMENT_FIELDS, "supervised", *(f"segments.{name}" for name in SEGMENT_FIELDS)]  # of their file


class FeatureStore:
    """The documents of a finished store of a target, and the features in `needs` of their tokens, read in `dtype`.

    Without `checksums` only sizes are compared. Raises UserError for an unfinished, damaged or unsuitable store.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        target_hash: str,
        tokenizer_hash: str,
        needs: Needs,
        dtype: torch.dtype = torch.float32,
        checksums: bool = True,
    ):
        folder = Path(path)
        manifest = read_manifest(folder)
        manifest.check_serves(folder, needs=needs, tokenizer_hash=tokenizer_hash, target_hash=target_hash)
        manifest.check_undamaged(folder, checksums=checksums)
        self.manifest, self.needs, self.dtype = manifest, needs, dtype
        self.tensor_specs = {spec.name: spec for spec in manifest.spec.schema.tensor_specs}
        arrays: dict[str, Any] = {
            name: tensor.numpy() for name, tensor in self._map_tensors(folder, DOCUMENTS_FILE, DOCUMENT_TENSORS).items()
        }
        self.segment_index = SegmentIndex(**{name: arrays.pop(f"segments.{name}") for name in SEGMENT_FIELDS})
        self.supervised_mask: Bool[np.ndarray, " tokens"] = arrays.pop("supervised")
        self.documents = Documents(**arrays, categories=manifest.categories, languages=manifest.languages)
        self.shards = [
            self._map_tensors(folder, shard_name(number), list(self.tensor_specs))
            for number in range(manifest.spec.shards)
        ]

    def _map_tensors(self, folder: Path, file: str, names: list[str]) -> dict[str, Tensor]:
        """Return tensors of a file, mapped into memory without being read."""
        try:
            with safe_open(folder / file, framework="pt") as tensors:
                return {name: tensors.get_tensor(name) for name in names}
        except SafetensorError as error:  # damage that a comparison of sizes does not detect
            raise self.manifest.damaged_error(folder, file, f"changed: {error}") from error

    def read_target_output(self, rows: list[list[DocumentPiece]], length: int) -> TargetOutput:
        """Return the stored target output of packed rows of `length` positions, on the host.

        Positions that are not stored are 0; they have no weight in any loss.
        """
        segments, shape = self._locate_rows(rows, length), (len(rows), length)
        is_topk = self.manifest.spec.schema.teacher is TeacherKind.topk
        return TargetOutput(
            captured=self._read_hidden_states("captured", segments, shape) if self.needs.layers else None,
            hidden=self._read_hidden_states("hidden", segments, shape)
            if self.needs.hidden or not is_topk
            else torch.zeros(*shape, 1, dtype=self.dtype),
            topk=self._read_topk_logits(segments, shape) if is_topk else None,
        )

    def _locate_rows(self, rows: list[list[DocumentPiece]], length: int) -> LocatedSegments:
        """Return the segments that hold the rows' pieces, with the positions of their tokens."""
        located = []
        for number, row in enumerate(rows):
            offset = number * length
            for piece in row:
                start = int(self.documents.starts[piece.document])
                begin, end = start + piece.begin, start + piece.end
                for segment in find_segments(self.segment_index, self.supervised_mask, begin, end):
                    left = offset + segment.first - begin
                    located.append((segment, np.arange(left, left + len(segment.supervised_mask))))
                offset += end - begin
        return located

    def _read_hidden_states(
        self, name: str, segments: LocatedSegments, shape: tuple[int, int]
    ) -> Float[Tensor, "rows length width"]:
        """Return dequantized hidden states, with those of a token's layers side by side."""
        spec = self.tensor_specs[name]
        # numpy uses huge pages on Linux: page faults on small ones take longer than filling them.
        zeros = np.zeros((math.prod(shape), math.prod(spec.shape) * self.dtype.itemsize), np.uint8)
        output = torch.from_numpy(zeros).view(self.dtype)
        for segment, token_positions in segments:
            shard = self.shards[segment.shard]
            rows, positions = segment.token_rows, token_positions
            if not spec.per_token:
                rows, positions = segment.supervised_rows, positions[segment.supervised_mask]
            for source, destination in split_contiguous(rows.start, positions):
                scale = shard[name + SCALE_SUFFIX][source] if name + SCALE_SUFFIX in shard else None
                output[destination] = dequantize(widen_fp8(shard[name][source]), scale).flatten(1)
        return output.unflatten(0, shape)

    def _read_topk_logits(self, segments: LocatedSegments, shape: tuple[int, int]) -> TopKLogits:
        """Return the top-k logits of rows.

        Positions that are not stored get a valid distribution, k tokens of probability 1 / (2k) and
        1/2 for the rest: a loss that is not finite would stay so when multiplied by its weight, 0.
        """
        k = self.manifest.spec.schema.top_k
        positions = np.concatenate([positions[segment.supervised_mask] for segment, positions in segments])
        tensors = {
            "ids": torch.arange(k).repeat(math.prod(shape), 1),
            "log_probs": torch.full((math.prod(shape), k), -math.log(2 * k)),
            "rest": torch.full((math.prod(shape),), 0.5),
        }
        for name, values in tensors.items():
            stored = [self.shards[s.shard][f"teacher.{name}"][s.supervised_rows] for s, _ in segments]
            values[torch.from_numpy(positions)] = torch.cat(stored).to(values.dtype)
        return TopKLogits(
            **{name: values.unflatten(0, shape) for name, values in tensors.items()},
            vocab_size=self.manifest.spec.schema.vocab_size,
        )


def split_contiguous(first: int, positions: Int[np.ndarray, " rows"]) -> Iterator[tuple[slice, slice]]:
    """Split shard rows from `first` on into chunks that go to contiguous positions.

    Yield the slices of shard rows and of positions, of at most CHUNK_ROWS each.

    >>> list(split_contiguous(5, np.array([2, 3, 7])))
    [(slice(5, 7, None), slice(2, 4, None)), (slice(7, 8, None), slice(7, 8, None))]
    """
    gaps = (np.flatnonzero(np.diff(positions) != 1) + 1).tolist()
    for begin, end in pairwise([0, *gaps, len(positions)]):
        for low in range(begin, end, CHUNK_ROWS):
            count, position = min(CHUNK_ROWS, end - low), int(positions[low])
            yield slice(first + low, first + low + count), slice(position, position + count)
