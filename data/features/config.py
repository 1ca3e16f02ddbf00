"""Configuration of `python -m data.capture`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from data.config import DataConf
from models.device.config import DeviceConf
from models.drafts.options import DraftConf
from models.target.config import TargetConf
from models.validation import POSITIVE, at_least, check_values, unused

MISSING: Any = "???"  # OmegaConf's marker for a required value


class Dtype(Enum):
    """The storage type of hidden states."""

    bf16 = "bf16"
    int8 = "int8"
    fp8 = "fp8"

    @property
    def max_value(self) -> float | None:
        """Return the value that a row's largest is scaled to; None if rows have no scale."""
        return {"bf16": None, "int8": 127.0, "fp8": 448.0}[self.value]


class TeacherKind(Enum):
    """The form in which the target's distribution is stored."""

    hidden = "hidden"  # the final hidden state, for the target's head: exact but for rounding
    topk = "topk"  # the k likeliest tokens and the mass of the rest


@dataclass(kw_only=True)
class CaptureConf:
    """Settings of a capture, which stores the features that `draft` needs of `target` on `data`."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING  # determines which features are stored; it is not trained
    data: DataConf = field(default_factory=DataConf)
    device: DeviceConf = field(default_factory=DeviceConf, metadata=unused("memory_gib"))
    dtype: Dtype = Dtype.int8  # of hidden states
    teacher: TeacherKind = TeacherKind.hidden
    top_k: int = 64  # tokens of teacher=topk
    batch: int = 8  # rows of data.row_length tokens in each pass of the target
    shard_mb: float = 512.0  # megabytes of a shard; writing one takes three times that in memory
    budget_gb: float | None = None  # disk budget in GB; null = all free space
    checksums: bool = True  # verify checksums of existing files; false compares only their sizes
    run_name: str = MISSING
    output_dir: str = "outputs/capture"

    def __post_init__(self) -> None:
        check_values(
            self, top_k=at_least(1), batch=at_least(1), budget_gb=POSITIVE, shard_mb=POSITIVE
        )
