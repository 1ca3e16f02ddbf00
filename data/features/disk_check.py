"""Whether a feature store fits its budget and its disk, before anything of it is written."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.features.plan import Plan
from data.features.quantize import Dtype
from data.features.schema import Layout, TeacherKind
from data.packing.pack import DOCUMENT
from models.errors import UserError

TOKEN = 4 + 1 + 1  # bytes of documents.safetensors: id, answer flag, supervised flag
INDEX = (8 + 4 + 4 + 4) + (8 + 4 + 4 + 8 + 8)  # of a document and its run
HEADER = 1024  # more than a file has beside its tensors
GB = 10**9


def check_room(plan: Plan, folder: Path, *, budget_gb: float | None, there: int) -> None:
    """Raises UserError where a store exceeds its budget, or the disk; `there` is written already.

    It says what would be smaller, and of each whether it fits.
    """
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed, free = plan.bytes(), shutil.disk_usage(disk).free
    budget = needed if budget_gb is None else int(budget_gb * GB)
    if needed > budget:
        key, got = "budget_gb", f"got {budget_gb:.4g}"
    elif needed - there > free:
        key, got = "output_dir", f"got {free / GB:.4g} GB free in {disk}"
    else:
        return
    tokens, taught = plan.counts.sum(0)
    raise UserError(
        f"{key}: must have room for {needed / GB:.4g} GB ({tokens:,} tokens, "
        f"{taught / tokens:.0%} supervised, {_words(plan.layout)}), {got}; "
        f"{_remedies(plan, min(budget, free + there))}"
    )


def _remedies(plan: Plan, limit: int) -> str:
    found = []
    for layout in _smaller(plan):
        size = plan.bytes(layout)
        fits = "fits" if size <= limit else "does not fit"
        found.append(f"{_words(layout)} takes {size / GB:.4g} GB and {fits}")
    if documents := _fitting(plan, limit):
        found.append(f"data.limit={documents} takes as many documents as fit")
    return ", ".join([*found, "or choose another output_dir"])


def _words(layout: Layout) -> str:
    return f"dtype={layout.dtype.value} teacher={layout.teacher.value}"


def _smaller(plan: Plan) -> Iterator[Layout]:
    """Layouts of fewer bytes, the mildest change first."""
    dtype, teacher = plan.layout.dtype, plan.layout.teacher
    small = Dtype.int8 if dtype is Dtype.bf16 else dtype
    tried = [(small, teacher), (dtype, TeacherKind.topk), (small, TeacherKind.topk)]
    for one, other in dict.fromkeys(tried):
        layout = replace(plan.layout, dtype=one, teacher=other)
        if plan.bytes(layout) < plan.bytes():
            yield layout


def _fitting(plan: Plan, limit: int) -> int:
    """How many documents, from the first, have room."""
    every, more = plan.layout.row_bytes
    spans = zip(plan.runs.first.tolist(), plan.runs.tokens.tolist(), strict=True)
    taught = [np.count_nonzero(plan.flags[first : first + count]) for first, count in spans]
    size = plan.runs.tokens * (every + TOKEN) + np.array(taught) * more + INDEX
    by_document = np.bincount(plan.packed.table[:, DOCUMENT], weights=size)
    room = limit - HEADER * (1 + len(plan.counts))
    return int(np.searchsorted(by_document.cumsum(), room, "right"))
