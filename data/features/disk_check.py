"""Check that a feature store fits its budget and its disk before any of it is written."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.features.plan import CapturePlan
from data.features.quantize import Dtype
from data.features.schema import FeatureSchema, TeacherKind
from data.packing.pack import DOCUMENT
from models.errors import UserError

TOKEN_BYTES = 4 + 1 + 1  # bytes of documents.safetensors: id, answer flag, supervised flag
INDEX_BYTES = (8 + 4 + 4 + 4) + (8 + 4 + 4 + 8 + 8)  # bytes of a document and its segment
HEADER_BYTES = 1024  # upper bound of a file's header
GB = 10**9


def check_disk_space(
    plan: CapturePlan, folder: Path, *, budget_gb: float | None, bytes_on_disk: int
) -> None:
    """Check that the store fits its budget and the disk, of which it has `bytes_on_disk` already.

    Raises UserError otherwise, which lists smaller settings and whether each of them fits.
    """
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed, free = plan.total_bytes(), shutil.disk_usage(disk).free
    budget = needed if budget_gb is None else int(budget_gb * GB)
    if needed > budget:
        key, got = "budget_gb", f"got {budget_gb:.4g}"
    elif needed - bytes_on_disk > free:
        key, got = "output_dir", f"got {free / GB:.4g} GB free in {disk}"
    else:
        return
    tokens, supervised = plan.shard_token_counts.sum(0)
    raise UserError(
        f"{key}: must have room for {needed / GB:.4g} GB ({tokens:,} tokens, "
        f"{supervised / tokens:.0%} supervised, {_describe_schema(plan.schema)}), {got}; "
        f"{_list_remedies(plan, min(budget, free + bytes_on_disk))}"
    )


def _list_remedies(plan: CapturePlan, limit: int) -> str:
    remedies = []
    for schema in _smaller_schemas(plan):
        size = plan.total_bytes(schema)
        fits = "fits" if size <= limit else "does not fit"
        remedies.append(f"{_describe_schema(schema)} takes {size / GB:.4g} GB and {fits}")
    if documents := _count_fitting_documents(plan, limit):
        remedies.append(f"data.limit={documents} takes as many documents as fit")
    return ", ".join([*remedies, "or choose another output_dir"])


def _describe_schema(schema: FeatureSchema) -> str:
    return f"dtype={schema.dtype.value} teacher={schema.teacher.value}"


def _smaller_schemas(plan: CapturePlan) -> Iterator[FeatureSchema]:
    """Yield schemas of fewer bytes, the mildest change first."""
    dtype, teacher = plan.schema.dtype, plan.schema.teacher
    small = Dtype.int8 if dtype is Dtype.bf16 else dtype
    changes = [(small, teacher), (dtype, TeacherKind.topk), (small, TeacherKind.topk)]
    for new_dtype, new_teacher in dict.fromkeys(changes):
        schema = replace(plan.schema, dtype=new_dtype, teacher=new_teacher)
        if plan.total_bytes(schema) < plan.total_bytes():
            yield schema


def _count_fitting_documents(plan: CapturePlan, limit: int) -> int:
    """Count the documents, from the first on, whose features fit in `limit` bytes."""
    token_bytes, supervised_bytes = plan.schema.row_bytes
    spans = zip(plan.segment_index.first.tolist(), plan.segment_index.tokens.tolist(), strict=True)
    supervised = [
        np.count_nonzero(plan.supervised_mask[first : first + count]) for first, count in spans
    ]
    size = (
        plan.segment_index.tokens * (token_bytes + TOKEN_BYTES)
        + np.array(supervised) * supervised_bytes
        + INDEX_BYTES
    )
    document_bytes = np.bincount(plan.packed.table[:, DOCUMENT], weights=size)
    budget = limit - HEADER_BYTES * (1 + len(plan.shard_token_counts))
    return int(np.searchsorted(document_bytes.cumsum(), budget, "right"))
