"""Configuration of `python -m data.capture`."""

from dataclasses import dataclass, field
from typing import Any

from data.config import DataConf
from data.features.schema import Dtype, FeatureSchema, TeacherKind
from models.device import DeviceConf
from models.distill.losses import LossConf
from models.drafts.base import DraftConf, Needs
from models.errors import require
from models.target.target import TargetConf
from models.validation import POSITIVE, at_least, check_values

MISSING: Any = "???"  # OmegaConf's marker for a required value


@dataclass(kw_only=True)
class CaptureConf:
    """Settings of a capture, which stores the features that `draft` needs of `target` on `data`."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING  # determines which features are stored; it is not trained
    data: DataConf = field(default_factory=DataConf)
    loss: LossConf = field(default_factory=LossConf)  # set by the draft's config group
    optim: Any = None  # set by the draft's config group, unused
    tree: Any = None  # set by the draft's config group, unused
    device: DeviceConf = field(default_factory=DeviceConf)
    dtype: Dtype = Dtype.int8  # of hidden states
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64  # tokens of teacher=topk
    batch: int = 8  # rows of data.row_length tokens in each pass of the target
    shard_mb: float = 512.0  # megabytes of a shard; writing one takes three times that in memory
    budget_gb: float | None = None  # disk budget in GB; null = all free space
    checksums: bool = True  # verify checksums of existing files; false compares only their sizes
    worker: int = 0  # index of this process
    workers: int = 1  # processes that share the shards
    run_name: str = MISSING
    output_dir: str = "outputs/capture"

    def __post_init__(self) -> None:
        check_values(
            self, top_k=at_least(1), batch=at_least(1), workers=at_least(1), budget_gb=POSITIVE,
            shard_mb=POSITIVE,
        )  # fmt: skip
        require(
            0 <= self.worker < self.workers,
            f"worker: must lie in 0..{self.workers - 1}, got {self.worker}; raise workers",
        )

    def build_schema(self, needs: Needs, *, hidden_size: int, vocab_size: int) -> FeatureSchema:
        """Build the schema of the store; raise UserError if the features cannot be stored."""
        require(
            needs.storable,
            f"draft: must leave its target as it is, got {self.draft.method}, whose features "
            "change during training; train it without a store",
        )
        require(
            not needs.context or self.data.overlap is None,
            f"data.overlap: must be null for {self.draft.method}, which reads what the target "
            f"computed on all earlier tokens, got {self.data.overlap}; raise data.row_length",
        )
        return FeatureSchema(
            layers=needs.layers, hidden=needs.hidden, context=needs.context, dtype=self.dtype,
            teacher=self.teacher, top_k=min(self.top_k, vocab_size), hidden_size=hidden_size,
            vocab_size=vocab_size,
        )  # fmt: skip
