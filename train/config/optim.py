"""The `optim` group of the configuration, and the learning rate that it describes."""

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from models.device.config import Precision
from models.io.errors import POSITIVE, SHARE, Rule, at_least, check_values, require


class OptimName(Enum):
    """Optimizer of the hidden matrices."""

    adamw = "adamw"
    muon = "muon"


class MuonScaling(Enum):
    """The factor of an orthogonalized update: of its singular values, or of its entries."""

    original = "original"  # sqrt(max(1, rows / columns))
    match_rms_adamw = "match_rms_adamw"  # 0.2 sqrt(max(rows, columns)): entries as large as AdamW's


class Schedule(Enum):
    """Shape of the learning rate after the warm-up."""

    cosine = "cosine"
    wsd = "wsd"  # warm-up, stable, decay
    constant = "constant"


AUTO = "auto"
AUTO_OR_ROWS = Rule(
    "must be at least 1, or auto",
    lambda rows: rows == AUTO or (type(rows) is int and rows >= 1),
    "auto takes what fits",
)
DEFAULT_STEPS = 300  # if neither optim.steps nor optim.epochs is set
MOMENT_DECAYS = Rule(
    "must be two numbers in [0, 1)",
    lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    "the default is [0.9, 0.95]",
)


@dataclass(kw_only=True)
class OptimConf:
    """Configuration of the optimizer, the learning rate, the steps and the rows of a step."""

    name: OptimName = OptimName.adamw
    lr: float = 1e-3
    muon_lr: float | None = None  # None: ten times lr, the usual ratio
    muon_scaling: MuonScaling = MuonScaling.original
    muon_precision: Precision = Precision.auto  # auto: float32 on a CPU, bfloat16 elsewhere
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    schedule: Schedule = Schedule.cosine
    warmup_ratio: float = 0.03  # share of the steps
    decay_ratio: float = 0.2  # share of the steps, for wsd
    min_lr_ratio: float = 0.0  # share of lr that the decay leads to, one step after the last
    steps: int | None = None  # null: from `epochs`, else 300
    epochs: float | None = None  # passes over the packed rows, in place of steps
    rows_per_step: int = 8  # over all processes; passes accumulate their gradients
    micro_batch_size: int | str = 8  # most rows of one pass of a process; auto: what fits
    max_grad_norm: float = 1.0  # maximum norm of the whole gradient
    recompute: bool = False  # the draft's layers in the backward pass: less memory, a fifth more work
    compile_loss: bool = True  # and the target's pass: takes a minute, more than a short run saves

    def __post_init__(self) -> None:
        check_values(
            self,
            "optim",
            steps=at_least(1),
            epochs=POSITIVE,
            rows_per_step=at_least(1),
            micro_batch_size=AUTO_OR_ROWS,
            warmup_ratio=SHARE,
            decay_ratio=SHARE,
            min_lr_ratio=SHARE,
            lr=POSITIVE,
            muon_lr=replace(POSITIVE, remedy="null takes ten times optim.lr"),
            weight_decay=at_least(0, "0 turns it off"),
            max_grad_norm=POSITIVE,
            betas=MOMENT_DECAYS,
        )
        require(
            self.epochs is None or self.steps is None,
            f"optim.epochs: must be null if optim.steps is set, got {self.epochs} and "
            f"{self.steps} steps; set one of them to null",
        )
        require(
            self.warmup_ratio + (self.decay_ratio if self.schedule is Schedule.wsd else 0) <= 1,
            "optim.warmup_ratio: warm-up and decay must share the steps, "
            f"got {self.warmup_ratio} + {self.decay_ratio}; lower one of them",
        )

    def check_route(self, device: str, *, is_lazy: bool) -> None:
        """Raise UserError for an optimizer that graphs of PyTorch/XLA cannot hold."""
        require(
            not is_lazy or self.name is OptimName.adamw,
            f"optim.name: must be adamw with device={device}, whose graphs cannot hold Muon's products (scaled addmm), "
            "got muon; use optim=adamw",
        )

    def micro_batch_rows(self, share: int) -> int:
        """Return the rows of each micro-batch of a process that has `share` rows of a step.

        It is the largest divisor of `share` that is at most `micro_batch_size`; all rows for auto.

        >>> OptimConf(micro_batch_size=4).micro_batch_rows(6)  # not 4 + 2: equal sizes share a graph
        3
        """
        most = share if isinstance(self.micro_batch_size, str) else self.micro_batch_size
        sizes = range(1, min(share, most) + 1)
        return max(size for size in sizes if share % size == 0)

    def total_steps(self, rows: int) -> int:
        """Return the steps of a run over `rows` packed rows.

        >>> OptimConf(epochs=2.0, rows_per_step=4).total_steps(rows=9), OptimConf().total_steps(rows=9)
        (5, 300)
        """
        if self.epochs is not None:
            return math.ceil(self.epochs * rows / self.rows_per_step)
        return self.steps or DEFAULT_STEPS

    def rate_factor(self, step: int, steps: int) -> float:
        """Return the share of the peak learning rate at `step` of `steps`, a pure function of them.

        >>> conf = OptimConf(warmup_ratio=0.2, decay_ratio=0.4, schedule=Schedule.wsd)
        >>> [round(conf.rate_factor(step, 10), 2) for step in range(10)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
        """
        warmup_steps = round(self.warmup_ratio * steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if self.schedule is Schedule.constant:
            return 1.0
        is_wsd = self.schedule is Schedule.wsd
        decay_steps = round(self.decay_ratio * steps) if is_wsd else steps - warmup_steps
        # + 1: the rate reaches its minimum one step after the last, so that the last one trains.
        decayed = max(0, step + 1 - (steps - decay_steps)) / (decay_steps + 1)
        if is_wsd:
            return 1 - decayed * (1 - self.min_lr_ratio)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * decayed)) / 2
