"""The configurations of `python -m train` and `train.plan`."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from data.config import DataConf, DataSource
from infer.config import EvaluationConf
from models.checkpoints.saved_states import FIRST_STAGE_FOLDER
from models.device.config import DeviceConf, MachineConf
from models.drafts.options import DraftConf
from models.io.errors import BELOW_ONE, POSITIVE, SEED, at_least, check_values, require
from models.io.tracking import TrackerConf
from models.losses.config import LossConf, LossName
from models.targets.config import TargetConf
from models.trees.config import TreeConf
from train.config.optim import AUTO, AUTO_OR_ROWS, OptimConf

MISSING: Any = "???"  # OmegaConf's marker of a required value
AUTO_OR_PROCESSES = replace(AUTO_OR_ROWS, remedy="auto leaves it to the plan")


class Weights(Enum):
    """The placement of weights: a full copy on each process, a part, or what the plan chooses."""

    replicated = "replicated"
    sharded = "sharded"
    auto = "auto"


@dataclass(kw_only=True)
class ParallelConf:
    """The placement of target and draft on the processes.

    A run on several processes lets its plan choose what is auto. Elsewhere auto is one process and replicated.
    """

    tensor: int | str = AUTO  # processes that share each of the target's layers
    target: Weights = Weights.auto  # over the data ranks
    draft: Weights = Weights.auto  # over all processes
    # A sharded draft's vocabulary heads that learn stay split by rows, which the plan may turn on.
    split_heads: bool = False

    def __post_init__(self) -> None:
        check_values(self, "parallel", tensor=AUTO_OR_PROCESSES)

    @property
    def tensor_size(self) -> int:
        """Return the processes that share each of the target's layers."""
        return 1 if isinstance(self.tensor, str) else self.tensor

    def settle(self) -> "ParallelConf":
        """Return the placement with one process and replicated for auto."""
        target, draft = (Weights.replicated if way is Weights.auto else way for way in (self.target, self.draft))
        return replace(self, tensor=self.tensor_size, target=target, draft=draft)

    @property
    def is_open(self) -> bool:
        """Return whether the plan may choose the layout."""
        return isinstance(self.tensor, str) or self.draft is Weights.auto

    @property
    def splits_target(self) -> bool:
        """Return True if several processes hold one copy of the target."""
        return self.tensor_size > 1 or self.target is Weights.sharded

    @property
    def splits_weights(self) -> bool:
        """Return True if target or draft are not whole on every process."""
        return self.splits_target or self.draft is Weights.sharded


@dataclass(kw_only=True)
class HeldOutConf:
    """The numbers of prompts that are held out of the training data."""

    selection: int = 32  # for the measurements that choose the checkpoint
    report: int = 64  # others, for the report; 0 requires evaluation.prompts
    batch: int = 4  # of the first, decoded at a time

    def __post_init__(self) -> None:
        check_values(self, "held_out", selection=at_least(1), report=at_least(0), batch=at_least(1))

    @property
    def largest_batch(self) -> int:
        """Return the most prompts that are decoded at a time."""
        return min(self.batch, self.selection)


@dataclass(kw_only=True)
class IntervalConf:
    """The steps from one log line, measurement or saved state of a run to the next."""

    log: int = 10
    eval: int = 100  # between measurements of the delivered tokens per round
    save: int | None = None  # null: by `save_minutes`
    save_minutes: float = 10.0  # between saved states, each written at the next log line

    def __post_init__(self) -> None:
        check_values(self, "interval", log=at_least(1), eval=at_least(1), save=at_least(1), save_minutes=POSITIVE)


@dataclass(kw_only=True)
class TrainConf:
    """Configuration of a run: distill `draft` from `target` on `data`, measure it with `tree`."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING
    data: DataConf = field(default_factory=DataConf)
    loss: LossConf = field(default_factory=LossConf)
    optim: OptimConf = field(default_factory=OptimConf)
    seed: int = 0  # of weights and noise; `data.seed` orders the rows
    held_out: HeldOutConf = field(default_factory=HeldOutConf)
    interval: IntervalConf = field(default_factory=IntervalConf)
    tree: TreeConf = field(default_factory=TreeConf)
    measure: bool = True  # decode prompts: to choose the checkpoint, for the report; false needs no layer of the target
    tune: bool = True  # the report also measures the decoding that is fastest here, beside `tree`
    evaluation: EvaluationConf = field(
        default_factory=EvaluationConf
    )  # of the finished draft; its sampling also chooses the checkpoint
    parallel: ParallelConf = field(default_factory=ParallelConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    log: TrackerConf = field(default_factory=TrackerConf)
    run_name: str = MISSING
    output_dir: str = "outputs/train"
    resume: bool = True  # continue the run of this name; false starts it over

    def __post_init__(self) -> None:
        check_values(self, seed=SEED)

    @property
    def save_interval(self) -> int | None:
        """Return the steps between saved states, or None if `interval.save_minutes` decides.

        A draft that writes rows needs a state at each renewal: a continued run renews them there.
        """
        on_policy = self.data.on_policy
        return self.interval.save or (on_policy.interval if on_policy.share else None)

    def first_stage(self) -> "TrainConf | None":
        """Return the run that trains what this one starts from, in a folder of this run, or None.

        If this run counts steps, a stage given in epochs takes as many: a trial is a trial of both.
        Its metrics go to its own metrics.jsonl alone.
        """
        stage = self.draft.first_stage
        if stage is None:
            return None
        muon_lr = None if self.optim.muon_lr is None else stage.lr_scale * self.optim.muon_lr
        optim = replace(self.optim, lr=stage.lr_scale * self.optim.lr, muon_lr=muon_lr)
        if stage.epochs is None or optim.epochs is not None:
            optim = replace(optim, steps=stage.steps, epochs=stage.epochs)
        return replace(
            self, draft=stage.draft, optim=optim, log=TrackerConf(), run_name=f"{self.run_name}/{FIRST_STAGE_FOLDER}"
        )

    def check_settings(self) -> None:
        """Raise UserError for a wrong setting, as far as that takes no file and no model."""
        self._check_overlap()
        self.optim.check_route(self.device.name.value, is_lazy=not self.device.is_native)
        on_policy = self.data.on_policy
        require(
            self.evaluation.prompts is not None or self.held_out.report > 0 or self.data.source is DataSource.demo,
            "held_out.report: must be at least 1 without evaluation.prompts, got 0; raise it or give these",
        )
        require(
            not on_policy.share or self.draft.is_language_model,
            f"data.on_policy.share: needs a draft that is a language model, got {self.draft.method}; set it to 0",
        )
        require(
            not on_policy.share or self.loss.name is not LossName.ce,
            f"data.on_policy.share: must be 0 for loss=ce, got {on_policy.share}; choose a loss with a teacher",
        )
        require(
            not (on_policy.share and self.interval.save) or self.interval.save % on_policy.interval == 0,
            f"interval.save: must be a multiple of data.on_policy.interval = {on_policy.interval}, "
            f"got {self.interval.save}; a continued run rewrites its rows at that step",
        )
        require(
            not self.optim.recompute or self.draft.has_layers,
            f"optim.recompute: must be false for {self.draft.method}, which runs no decoder layers, got true; "
            "leave it out",
        )
        require(
            not self.optim.recompute or self.device.is_native,
            f"optim.recompute: must be false with device={self.device.name.name}, whose compiler undoes it, got true; "
            "lower data.row_length",
        )
        self.check_measure()
        depth, deepest = self.tree.build().depth, self.draft.max_proposal_depth
        require(
            depth <= deepest,
            f"tree.depth: must be at most the {deepest} tokens that the draft can propose, "
            f"got {depth}; take tree=chain tree.depth={deepest}, or raise draft.{self.draft.depth_key}",
        )

    def check_measure(self) -> None:
        """Raise UserError if the run needs the target's layers, but `measure` leaves them out."""
        if self.measure:
            return
        require(
            self.data.source is DataSource.captured,
            f"measure: must be true for data.source={self.data.source.value}, got false; capture the target's features "
            "by data.capture, and train from the store with data=captured",
        )
        require(
            not self.parallel.splits_target,
            f"parallel: must leave the target whole with measure=false, which loads none of its layers, got "
            f"tensor={self.parallel.tensor}, target={self.parallel.target.name}; leave these out",
        )
        is_cut = self.draft.is_language_model and self.draft.pretrained is None
        require(
            not is_cut and not self.draft.trains_target,
            "measure: must be true for a draft that is cut from its target or adapts it, got false; take another draft",
        )
        require(
            self.device.is_native,
            f"measure: must be true with device={self.device.name.name}, got false; capture and train on another route",
        )

    def _check_overlap(self) -> None:
        overlap, deepest = self.data.overlap, self.draft.max_proposal_depth
        require(
            overlap is None or not self.draft.needs_context,
            f"data.overlap: must be null for {self.draft.method}, got {overlap}; raise data.row_length instead",
        )
        require(
            overlap is None or overlap > deepest,
            f"data.overlap: must be above the {deepest} tokens that the draft can propose, got {overlap}; raise it",
        )
        require(
            overlap is None or not self.data.on_policy.share,
            f"data.overlap: must be null with data.on_policy.share, got {overlap}; set it to null",
        )


@dataclass(kw_only=True)
class TrainPlanConf(TrainConf):
    """Configuration of a run, and of the machine to plan it for."""

    machine: MachineConf = field(default_factory=MachineConf)
    memory_margin: float = 0.1  # share of a core's memory for compiler, runtime, collectives
    prompt_tokens: int | None = None  # of the longest held-out prompt; null = a whole row
    tokens: float | None = None  # of the data set; null = those that the steps of the run read

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(self, memory_margin=BELOW_ONE, prompt_tokens=at_least(1), tokens=at_least(1))
