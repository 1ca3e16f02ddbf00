"""The configuration of `python -m train`."""

from dataclasses import dataclass, field
from typing import Any

from data.config import DataConf, DataSource
from data.eval_prompts import prompts as prompt_files
from data.features import compatibility
from data.preview import Preview, check_and_read_first_rows, preview_rows
from infer.config import EvaluationConf, check_prompts
from models.device import Device, DeviceConf
from models.distill.losses import LossConf, LossName
from models.drafts.base import DraftConf
from models.errors import require, run_checks
from models.speculate.tree import TreeConf
from models.target.precision import build_device
from models.target.target import TargetConf
from models.validation import POSITIVE, at_least, check_values
from train.distributed.parallel import Parallel, ParallelConf
from train.log import LogConf
from train.optim import OptimConf, Schedule

MISSING: Any = "???"  # OmegaConf's marker of a required value


@dataclass(kw_only=True)
class TrainConf:
    """Configuration of a run: distill `draft` from `target` on `data`, measure it with `tree`."""

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
    eval_every: int = 100  # steps between measurements of the delivered tokens per round
    num_eval_prompts: int = 32  # held-out prompts in each of these measurements
    held_out_prompts: int = 64  # other prompts, for the report; 0 requires evaluation.prompts
    save_minutes: float = 10.0  # between saved states, each written at the next log line
    save_every: int | None = None  # steps between saved states, in place of save_minutes

    def __post_init__(self) -> None:
        check_values(
            self, eval_every=at_least(1), num_eval_prompts=at_least(1), save_every=at_least(1),
            held_out_prompts=at_least(0), save_minutes=POSITIVE,
        )  # fmt: skip

    @property
    def renewal_interval(self) -> int:
        """Return the steps between on-policy renewals; states are saved at multiples of them."""
        return self.data.on_policy.interval if self.data.on_policy.share else 1

    @property
    def num_states(self) -> int:
        """Return the most states on disk at once.

        During a save these are the last and the new one, and if the run can be extended from an
        earlier state, that one too.
        """
        schedule = self.optim.schedule
        keeps_extendable = schedule is Schedule.wsd or (
            schedule is Schedule.constant and self.renewal_interval > 1
        )
        return 3 if keeps_extendable else 2

    def check(self, *, reads_data: bool = True) -> Preview | None:
        """Return a preview of the first rows of the data, or None without `reads_data`.

        Raise UserError for an invalid configuration, before a model is loaded. A warm-up reads no
        data.
        """
        self.check_settings()
        self.parallel.check(
            rows=self.optim.rows_per_step,
            trains_target=self.draft.trains_target,
            device=self.device.name,
            optimizer=self.optim.name.value,
        )
        require(
            self.evaluation.prompts is not None
            or self.held_out_prompts > 0
            or self.data.source is DataSource.demo,
            "held_out_prompts: must be at least 1 if evaluation.prompts is not set, got 0; "
            "raise it or give evaluation.prompts=FILE",
        )
        checks = [self.target.read_config, self.draft.check]
        preview = None
        if reads_data:
            self.data.check_target(self.target)
            preview = preview_rows(
                self.data, self.target, check_and_read_first_rows(self.data, *checks)
            )
        else:
            run_checks(*checks)
        compatibility.check_captured_data(
            self.data, target=self.target, draft=self.draft, loss=self.loss
        )
        self.parallel.check_target(self.target, device=self.device.name)
        if self.evaluation.prompts is not None:
            prompt_files.read_prompt_rows(self.evaluation.prompts)
            check_prompts(self.target, self.evaluation)
        return preview

    def check_settings(self) -> None:
        """Raise UserError for a wrong setting, as far as that takes no file and no model."""
        self._check_overlap()
        on_policy = self.data.on_policy
        require(
            not on_policy.share or self.draft.is_language_model,
            f"data.on_policy.share: needs a draft that is a language model, got "
            f"{on_policy.share} with {self.draft.method}; set it to 0",
        )
        require(
            not on_policy.share or self.loss.name is not LossName.ce,
            f"data.on_policy.share: must be 0 for loss=ce, got {on_policy.share}; "
            "cross-entropy on the draft's own text carries no signal from the target",
        )
        require(
            self.save_every is None or self.save_every % self.renewal_interval == 0,
            f"save_every: must be a multiple of data.on_policy.interval = {on_policy.interval}, "
            f"got {self.save_every}; a continued run rewrites its rows at that step",
        )
        depth, deepest = self.tree.build().depth, self.draft.max_proposal_depth
        require(
            depth <= deepest,
            f"tree.depth: must be at most the {deepest} tokens that the draft can propose, "
            f"got {depth}; lower tree.depth or raise draft.{self.draft.depth_key}",
        )

    def build_parallel(self, *, trackers: list[str]) -> Parallel:
        """Build the run's processes, after `check`; raise UserError for what they cannot do."""
        device = build_device(self.device, self.target)
        self.check_device(device)
        return self.parallel.build(device, trackers=trackers)

    def check_device(self, device: Device) -> None:
        """Raise UserError, before a model is loaded, if the device cannot do what the run needs."""
        self.optim.check(device)
        self.data.check_device(device)

    def _check_overlap(self) -> None:
        overlap, deepest = self.data.overlap, self.draft.max_proposal_depth
        require(
            overlap is None or not self.draft.needs_context,
            f"data.overlap: must be null for {self.draft.method}, which reads what the target "
            f"computed on all earlier tokens, got {overlap}; raise data.row_length instead",
        )
        require(
            overlap is None or overlap > deepest,
            f"data.overlap: must be above the {deepest} tokens that the draft can propose "
            f"(draft.{self.draft.depth_key}), got {overlap}; raise it",
        )
        require(
            overlap is None or not (self.data.on_policy.share or self.loss.half_life),
            "data.overlap: must be null with data.on_policy.share or loss.half_life, which "
            f"start with an answer, got {overlap}; raise data.row_length instead",
        )
