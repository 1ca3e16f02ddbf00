"""Whether a feature store serves a run: its target, its draft and its loss."""

from pathlib import Path

import torch

from data.config import DataConf, Source
from data.features import manifest as store_manifest
from data.features.manifest import Manifest
from data.features.reader import refuse_others
from data.features.schema import TeacherKind
from models.checkpoint import tokenizer_fingerprint
from models.distill.losses import LossConf
from models.drafts.base import Draft, DraftConf
from models.errors import UserError
from models.meta_model import outline, outlined
from models.target.target import Target, TargetConf


def check(data: DataConf, *, target: TargetConf, draft: DraftConf, loss: LossConf) -> None:
    """Refuse what a store cannot serve, before a weight is read. Raises UserError."""
    if data.source is not Source.captured:
        return
    for key, value in (
        ("data.on_policy.share", data.on_policy.share),
        ("data.keep_features", data.keep_features),
    ):
        if value:
            raise UserError(
                f"{key}: must be {type(value)(0)} with data.source=captured, got {value}; a store "
                "holds what the target computed on its own documents, for all epochs"
            )
    shape = outline(target, torch.float32)
    needs = outlined(draft, shape, loss=loss, seed=0).needs
    if not needs.storable:
        raise UserError(
            f"data.source: must be documents for draft {draft.method}, which changes its target "
            f"while it learns, got {data.source.value}; give the documents that were captured"
        )
    folder = Path(str(data.path))
    manifest = store_manifest.read(folder)
    tokenizer_hash = tokenizer_fingerprint(target.source.tokenizer())
    refuse_others(
        manifest, folder, tokenizer_hash=tokenizer_hash, needs=needs,
        hidden_size=shape.hidden_size,
    )  # fmt: skip
    manifest.refuse_damaged(folder, checksums=False)  # all bytes are read once the target is known
    if manifest.made.layout.teacher is TeacherKind.topk and loss.temperature != 1:
        raise UserError(
            f"loss.temperature: must be 1 with a store of teacher=topk, got {loss.temperature}; "
            "what is behind the likeliest tokens is known at 1 alone"
        )


def described(data: DataConf, target: Target, draft: Draft) -> Manifest | None:
    """What a run's store holds, for one of this shape; None where it has none."""
    if data.source is not Source.captured:
        return None
    folder = Path(str(data.path))
    manifest = store_manifest.read(folder)
    refuse_others(manifest, folder, needs=draft.needs, hidden_size=target.hidden_size)
    return manifest
