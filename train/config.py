"""The whole configuration of `python -m train`."""

from dataclasses import dataclass, field
from typing import Any

from data.config import DataConf, Source
from data.eval_prompts import prompts as prompt_files
from data.features import compatibility
from data.preview import Preview, preview, rows_beside
from infer.config import EvaluationConf
from infer.context import check_prompts
from models.device import Device, DeviceConf
from models.distill.losses import LossConf, LossName
from models.drafts.base import DraftConf
from models.errors import UserError, together
from models.speculate.tree import TreeConf
from models.target.target import TargetConf
from train.distributed.parallel import Parallel, ParallelConf
from train.log import LogConf
from train.optim import OptimConf, Schedule

MISSING: Any = "???"  # OmegaConf's mark of a required value


@dataclass(kw_only=True)
class TrainConf:
    """Distil `draft` from `target` on `data`, then measure it with `tree`."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING
    data: DataConf = field(default_factory=DataConf)
    loss: LossConf = field(default_factory=LossConf)
    tree: TreeConf = field(default_factory=TreeConf)
    optim: OptimConf = field(default_factory=OptimConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    parallel: ParallelConf = field(default_factory=ParallelConf)
    log: LogConf = field(default_factory=LogConf)
    evaluation: EvaluationConf = field(default_factory=EvaluationConf)  # of the finished draft
    seed: int = 0
    run_name: str = MISSING
    output_dir: str = "outputs/train"
    resume: bool = True  # continue the run of this name; false starts it over
    eval_every: int = 100  # steps between measurements of the delivered tokens a round
    eval_prompts: int = 32  # held-out prompts of such a measurement
    held_out_prompts: int = 64  # others of the data, for the report; 0 needs evaluation.prompts
    save_minutes: float = 10.0  # between saved states, which are written at the next log line
    save_every: int | None = None  # steps between saved states, in place of save_minutes

    def __post_init__(self) -> None:
        for name in ("eval_every", "eval_prompts", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, got {value}")
        if self.held_out_prompts < 0:
            raise UserError(f"held_out_prompts: must be at least 0, got {self.held_out_prompts}")
        if self.save_minutes <= 0:
            raise UserError(f"save_minutes: must be positive, got {self.save_minutes}")

    @property
    def renewal(self) -> int:
        """Steps of which a state's must be a multiple: on-policy rows are written anew there."""
        return self.data.on_policy.every if self.data.on_policy.share else 1

    @property
    def states(self) -> int:
        """States on disk while one is written: the last, the new one, and one to extend from."""
        schedule = self.optim.schedule
        kept = schedule is Schedule.wsd or (schedule is Schedule.constant and self.renewal > 1)
        return 3 if kept else 2

    def check(self, *, reads_data: bool = True) -> Preview | None:
        """Refuse what can be known to be wrong before a model is loaded.

        Returns what the first rows of the data hold; a warm-up reads none.
        """
        self.check_settings()
        self.parallel.check(
            rows=self.optim.rows, adapts=self.draft.adapts, device=self.device.name,
            optimizer=self.optim.name.value,
        )  # fmt: skip
        if self.evaluation.prompts is None:
            self._check_held_out()
        missing = [self.target.source.config, self.draft.check]
        if not reads_data:
            together(*missing)
            found = None
        else:
            self.data.check_target(self.target)
            found = preview(self.data, self.target, rows_beside(self.data, *missing))
        compatibility.check(self.data, target=self.target, draft=self.draft, loss=self.loss)
        self.parallel.check_target(self.target, device=self.device.name)
        if self.evaluation.prompts is not None:
            prompt_files.read(self.evaluation.prompts)
            check_prompts(self.target, self.evaluation)
        return found

    def check_settings(self) -> None:
        """Refuse what can be known without a file or a model."""
        self._check_on_policy()
        self._check_overlap()
        depth, deepest = self.tree.build().depth, self.draft.deepest
        if depth > deepest:
            raise UserError(
                f"tree.depth: must be at most the {deepest} tokens that the draft can propose, "
                f"got {depth}; lower tree.depth or raise draft.{self.draft.depth_key}"
            )

    def processes(self, *, trackers: list[str]) -> Parallel:
        """Where it runs, after `check`. Refuses what the device or the processes cannot do."""
        device = self.device.build()
        self.check_device(device)
        return self.parallel.build(device, trackers=trackers)

    def check_device(self, device: Device) -> None:
        """Refuse what this device cannot do, before a model is loaded."""
        self.optim.check(device)
        self.data.check_device(device)

    def _check_held_out(self) -> None:
        if not self.held_out_prompts and self.data.source is not Source.demo:
            raise UserError(
                "held_out_prompts: must be at least 1 where evaluation.prompts names none, got 0; "
                "raise it or give evaluation.prompts=FILE"
            )

    def _check_on_policy(self) -> None:
        wanted = self.data.on_policy
        if not wanted.share:
            return
        if not self.draft.speaks:
            raise UserError(
                f"data.on_policy.share: needs a draft that is a language model, got "
                f"{wanted.share} with {self.draft.method}; set it to 0"
            )
        if self.loss.name is LossName.ce:
            raise UserError(
                f"data.on_policy.share: must be 0 for loss=ce, got {wanted.share}; "
                "what the draft wrote itself teaches nothing but itself"
            )
        if self.save_every is not None and self.save_every % wanted.every:
            raise UserError(
                f"save_every: must be a multiple of data.on_policy.every = {wanted.every}, "
                f"got {self.save_every}; a continued run renews where it was saved"
            )

    def _check_overlap(self) -> None:
        overlap, deepest = self.data.overlap, self.draft.deepest
        if overlap is None:
            return
        if self.draft.reads_context:
            raise UserError(
                f"data.overlap: must be null for {self.draft.method}, which reads what the target "
                f"computed on all tokens before, got {overlap}; raise data.length instead"
            )
        if overlap <= deepest:
            raise UserError(
                f"data.overlap: must be above the {deepest} tokens that the draft can propose "
                f"(draft.{self.draft.depth_key}), got {overlap}; raise it"
            )
        if self.data.on_policy.share or self.loss.half_life is not None:
            raise UserError(
                f"data.overlap: must be null with data.on_policy.share or loss.half_life, which "
                f"begin where an answer does, got {overlap}; raise data.length instead"
            )
