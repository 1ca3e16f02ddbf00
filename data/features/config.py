"""What `python -m data.capture` takes."""

from dataclasses import dataclass, field
from typing import Any

from data.config import DataConf
from data.features.quantize import Dtype
from data.features.schema import Layout, TeacherKind
from models.device import DeviceConf
from models.distill.losses import LossConf
from models.drafts.base import DraftConf, Needs
from models.errors import UserError
from models.target.target import TargetConf

MISSING: Any = "???"  # OmegaConf's mark of a required value


@dataclass(kw_only=True)
class CaptureConf:
    """Keep on disk what `draft` needs of `target` on `data`."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING  # it says what it needs; nothing is trained
    data: DataConf = field(default_factory=DataConf)
    loss: LossConf = field(default_factory=LossConf)  # drafts bring theirs
    optim: Any = None  # likewise
    device: DeviceConf = field(default_factory=DeviceConf)
    dtype: Dtype = Dtype.int8  # of hidden states
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64  # tokens of teacher=topk
    batch: int = 8  # rows of data.length tokens that the target looks at together
    shard_mb: float = 512.0  # megabytes of a shard; memory holds it three times to write it
    budget_gb: float | None = None  # of disk; null = what is free
    checksums: bool = True  # compare what is there already, else sizes alone
    worker: int = 0  # of `workers` processes that each capture a part of the shards
    workers: int = 1
    run_name: str = MISSING
    output_dir: str = "outputs/capture"

    def __post_init__(self) -> None:
        for name in ("top_k", "batch", "workers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("budget_gb", "shard_mb"):
            if (given := getattr(self, name)) is not None and given <= 0:
                raise UserError(f"{name}: must be more than 0, got {given}")
        if not 0 <= self.worker < self.workers:
            raise UserError(
                f"worker: must lie in 0..{self.workers - 1}, got {self.worker}; raise workers"
            )

    def layout(self, needs: Needs, *, hidden_size: int, vocab_size: int) -> Layout:
        """What is stored of each token. Raises UserError where features cannot be kept."""
        if not needs.storable:
            raise UserError(
                f"draft: must leave its target as it is, got {self.draft.method}, whose features "
                "change while it learns; train it without a store"
            )
        if needs.context and self.data.overlap is not None:
            raise UserError(
                f"data.overlap: must be null for {self.draft.method}, which reads what the target "
                f"computed on all tokens before, got {self.data.overlap}; raise data.length instead"
            )
        return Layout(
            layers=needs.layers, hidden=needs.hidden, context=needs.context, dtype=self.dtype,
            teacher=self.teacher, top_k=min(self.top_k, vocab_size), hidden_size=hidden_size,
            vocab_size=vocab_size,
        )  # fmt: skip
