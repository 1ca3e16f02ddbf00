"""Which rows a capture looks at, in which shard each goes, and how many bytes that will be."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from data.features.index import Runs, runs_of, shortened, supervised
from data.features.schema import Layout
from data.packing.documents import Documents, Packed
from data.packing.pack import PackReport, pack

HELD = ("ids", "answer", "starts", "category", "language", "conversation")  # of Documents
METADATA = {"format": "pt"}
NAMES = {
    torch.bool: "BOOL", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
MB = 10**6


@dataclass(kw_only=True)
class Plan:
    """Rows to look at, and where what is seen in them goes."""

    packed: Packed
    layout: Layout
    flags: Bool[np.ndarray, " tokens"]  # supervised tokens of the documents
    runs: Runs  # one for each piece, row after row
    counts: Int[np.ndarray, "shards 2"]  # tokens, supervised tokens
    rows_a_shard: int

    @classmethod
    def of(
        cls, documents: Documents, layout: Layout, *, length: int, overlap: int | None,
        batch: int, shard_mb: float,
    ) -> tuple["Plan", PackReport]:  # fmt: skip
        """Documents as the target will look at them; rows of a shard are whole batches."""
        if overlap is None:
            documents = shortened(documents, length)
        packed, report = pack(documents, length, overlap=overlap)
        flags = supervised(documents)
        fullest = layout.bytes(length, length) * batch
        rows_a_shard = batch * max(1, int(shard_mb * MB / fullest))
        runs, counts = runs_of(packed, flags, rows_a_shard=rows_a_shard)
        plan = cls(
            packed=packed, layout=layout, flags=flags, runs=runs, counts=counts,
            rows_a_shard=rows_a_shard,
        )  # fmt: skip
        return plan, report

    def rows(self, shard: int) -> list[int]:
        """Rows of the packed documents that a shard holds."""
        first = shard * self.rows_a_shard
        return list(range(first, min(first + self.rows_a_shard, len(self.packed))))

    def stored(
        self, rows: list[int]
    ) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " supervised"]]:
        """Places in these rows end to end whose features are stored, in the order of the shard."""
        places, taught = [], []
        for number, row in enumerate(rows):
            right = number * self.packed.length
            pieces = range(*self.packed.starts[row : row + 2].tolist())
            for run, (_, begin, end, _) in zip(pieces, self.packed.table[pieces], strict=True):
                right += int(end - begin)
                count, first = int(self.runs.tokens[run]), int(self.runs.first[run])
                here = np.arange(right - count, right)  # the first ones may be of the piece before
                places.append(here)
                taught.append(here[self.flags[first : first + count]])
        return np.concatenate(places), np.concatenate(taught)

    def documents_file(self) -> dict[str, Tensor]:
        """What data/features/reader.py reads them from."""
        documents = self.packed.documents
        held = {name: getattr(documents, name) for name in HELD}
        runs = {f"runs.{name}": values for name, values in vars(self.runs.ordered()).items()}
        arrays = held | runs | {"supervised": self.flags}
        return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}

    # --- sizes, in bytes ----------------------------------------------------------------------

    @property
    def documents_bytes(self) -> int:
        return file_bytes({n: (t.dtype, t.shape) for n, t in self.documents_file().items()})

    def shard_bytes(self, layout: Layout | None = None) -> Int[np.ndarray, " shards"]:
        """Of each, in this or another layout."""
        parts = (layout or self.layout).parts
        tensors = (
            {p.name: (p.dtype, (tokens if p.every else taught, *p.shape)) for p in parts}
            for tokens, taught in self.counts.tolist()
        )
        return np.array([file_bytes(each) for each in tensors])

    def bytes(self, layout: Layout | None = None) -> int:
        """Of the whole store."""
        return int(self.shard_bytes(layout).sum()) + self.documents_bytes


def file_bytes(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> int:
    """Of a safetensors file: the length of its header, the header, and the tensors end to end.

    >>> import safetensors.torch
    >>> small = {"x": torch.zeros(3, 5, dtype=torch.int8), "y": torch.zeros(70)}
    >>> file = safetensors.torch.save(small, metadata=METADATA)
    >>> file_bytes({name: (x.dtype, x.shape) for name, x in small.items()}) == len(file)
    True
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda t: (-t[1][0].itemsize, t[0])):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    written = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-written // 8) * 8 + end
