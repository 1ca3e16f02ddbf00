"""Check that a feature store serves a run: its target, its draft and its loss."""

from pathlib import Path

import torch

from data.config import DataConf, DataSource, TeacherKind
from data.features.manifest import read_manifest
from models.checkpoints.fingerprints import tokenizer_fingerprint
from models.drafts.options import DraftConf
from models.io.errors import require
from models.losses.config import LossConf
from models.meta_model import build_meta_draft, build_meta_target
from models.targets.config import TargetConf
from models.targets.pretrained import load_tokenizer


def check_captured_data(data: DataConf, *, target: TargetConf, draft: DraftConf, loss: LossConf) -> None:
    """Raise UserError, before weights are read, if the run cannot train from its store."""
    if data.source is not DataSource.captured:
        return
    for key, value in (("data.on_policy.share", data.on_policy.share), ("data.keep_features", data.keep_features)):
        require(
            not value,
            f"{key}: must be {type(value)(0)} with data.source=captured, got {value}; a store has fixed documents",
        )
    shape = build_meta_target(target, torch.float32)
    needs = build_meta_draft(draft, shape).needs
    require(
        needs.storable,
        f"data.source: must be documents for draft {draft.method}, which changes its target "
        f"during training, got {data.source.value}; give the documents that were captured",
    )
    folder = Path(str(data.path))
    manifest = read_manifest(folder)
    manifest.check_serves(
        folder, needs=needs, hidden_size=shape.hidden_size, tokenizer_hash=tokenizer_fingerprint(load_tokenizer(target))
    )
    require(
        manifest.spec.schema.on_prompts or not loss.on_prompts,
        f"loss.on_prompts: must be false with {folder}, whose teacher covers answers only, got true; "
        "set it to false, or capture with on_prompts=true under another run_name",
    )
    manifest.check_undamaged(folder, checksums=False)  # checksums follow once the target is loaded
    require(
        manifest.spec.schema.teacher is not TeacherKind.topk or loss.temperature == 1,
        f"loss.temperature: must be 1 with a store of teacher=topk, got {loss.temperature}; "
        "the mass of the tokens outside the top k is known only at temperature 1",
    )
