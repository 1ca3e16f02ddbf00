"""Configuration of `python -m data.capture`."""

from dataclasses import dataclass, field
from typing import Any

from data.config import DataConf
from data.features.quantize import Dtype
from data.features.schema import FeatureSchema, TeacherKind
from models.device import DeviceConf
from models.distill.losses import LossConf
from models.drafts.base import DraftConf, Needs
from models.errors import UserError
from models.target.target import TargetConf

MISSING: Any = "???"  # OmegaConf's marker for a required value


@dataclass(kw_only=True)
class CaptureConf:
    """Settings of a capture, which stores the features that `draft` needs of `target` on `data`."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING  # determines which features are stored; it is not trained
    data: DataConf = field(default_factory=DataConf)
    loss: LossConf = field(default_factory=LossConf)  # set by the draft's config group
    optim: Any = None  # set by the draft's config group, unused
    device: DeviceConf = field(default_factory=DeviceConf)
    dtype: Dtype = Dtype.int8  # of hidden states
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64  # tokens of teacher=topk
    batch: int = 8  # rows of data.length tokens in each pass of the target
    shard_mb: float = 512.0  # megabytes of a shard; writing one takes three times that in memory
    budget_gb: float | None = None  # disk budget in GB; null = all free space
    checksums: bool = True  # verify checksums of existing files; false compares only their sizes
    worker: int = 0  # index of this process
    workers: int = 1  # processes that share the shards
    run_name: str = MISSING
    output_dir: str = "outputs/capture"

    def __post_init__(self) -> None:
        for name in ("top_k", "batch", "workers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("budget_gb", "shard_mb"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise UserError(f"{name}: must be more than 0, got {value}")
        if not 0 <= self.worker < self.workers:
            raise UserError(
                f"worker: must lie in 0..{self.workers - 1}, got {self.worker}; raise workers"
            )

    def build_schema(self, needs: Needs, *, hidden_size: int, vocab_size: int) -> FeatureSchema:
        """Build the schema of the store; raise UserError where the features cannot be stored."""
        if not needs.storable:
            raise UserError(
                f"draft: must leave its target as it is, got {self.draft.method}, whose features "
                "change during training; train it without a store"
            )
        if needs.context and self.data.overlap is not None:
            raise UserError(
                f"data.overlap: must be null for {self.draft.method}, which reads what the target "
                f"computed on all tokens before, got {self.data.overlap}; raise data.length instead"
            )
        return FeatureSchema(
            layers=needs.layers, hidden=needs.hidden, context=needs.context, dtype=self.dtype,
            teacher=self.teacher, top_k=min(self.top_k, vocab_size), hidden_size=hidden_size,
            vocab_size=vocab_size,
        )  # fmt: skip
