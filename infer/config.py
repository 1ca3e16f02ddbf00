"""The configuration of `infer.eval`, `infer.calibrate` and the evaluation of a training run."""

from dataclasses import dataclass, field
from typing import Any

from data.config import DEMO
from infer.verify import AcceptanceRule, TypicalRule, Verification, build_acceptance_rule
from models.device import DeviceConf
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import TreeConf
from models.target.target import TargetConf

MAX_RANKS = 256
DEMO_NEW_TOKENS, DEFAULT_NEW_TOKENS = 64, 256  # of answers to the demo's and to other prompts
OWN_TARGET = "own"  # a target.name: the target that the draft was distilled from


@dataclass(kw_only=True)
class EvaluationConf:
    """The prompts and settings of an evaluation."""

    # a file, a folder, a dataset or `demo`; null = prompts held out of the draft's training data
    prompts: str | None = None
    limit: int | None = None  # prompts of each category; null = all
    turns: int = 1  # of each conversation; later turns follow the target's own answers
    max_new_tokens: int | None = None  # null = 64 for the demo's prompts, 256 for others
    sampling: SamplingConf = field(default_factory=SamplingConf)
    verification: Verification = Verification.auto
    # typical acceptance takes tokens above min(epsilon, delta * exp(-entropy))
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    batches: list[int] = field(default_factory=lambda: [8])  # batch sizes measured besides 1
    replay: bool = False  # also measures proposals at every position of the target's own text

    def __post_init__(self) -> None:
        if self.new_tokens < 2:
            raise UserError(
                f"evaluation.max_new_tokens: must be at least 2, got {self.max_new_tokens}"
            )
        if self.limit is not None and self.limit < 1:
            raise UserError(f"evaluation.limit: must be at least 1, got {self.limit}; null = all")
        if self.replay and (
            self.acceptance_rule.is_ratio_test or not self.acceptance_rule.lossless
        ):
            raise UserError(
                "evaluation.replay: needs greedy or coupled verification, whose answers do not "
                f"depend on the draft, got {self.acceptance_rule.name}; set it to false"
            )
        if self.turns < 1:
            raise UserError(f"evaluation.turns: must be at least 1, got {self.turns}")
        if any(batch < 2 for batch in self.batches):
            raise UserError(
                f"evaluation.batches: must be 2 or more each, got {list(self.batches)}; "
                "[] measures one row at a time alone"
            )
        for key in ("typical_epsilon", "typical_delta"):
            if getattr(self, key) <= 0:
                raise UserError(f"evaluation.{key}: must be above 0, got {getattr(self, key)}")
        _ = self.acceptance_rule  # raises UserError if verification and sampling do not fit

    @property
    def new_tokens(self) -> int:
        """Return the maximum tokens of an answer."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return DEMO_NEW_TOKENS if self.prompts in (None, DEMO) else DEFAULT_NEW_TOKENS

    @property
    def quick_tokens(self) -> int:
        """Return the maximum tokens during training, where few suffice to compare checkpoints."""
        return DEMO_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def acceptance_rule(self) -> AcceptanceRule:
        """Return the acceptance rule of `Decoder`."""
        typical = TypicalRule(epsilon=self.typical_epsilon, delta=self.typical_delta)
        return build_acceptance_rule(self.verification, self.sampling, typical=typical)


def parse_checkpoints(value: Any) -> list[str] | None:
    """Return `checkpoint` as a list of directories; None stands for the newest finished run."""
    paths = [value] if isinstance(value, str) else value
    if value is None or (isinstance(paths, list) and paths and {str} == set(map(type, paths))):
        return paths
    raise UserError(f"checkpoint: must be a directory or a list of them, got {value}")


@dataclass(kw_only=True)
class EvalConf:
    """The configuration of `python -m infer.eval`.

    A bare call evaluates the newest finished training run.
    """

    checkpoint: Any = None  # a directory, or a list of them
    target: TargetConf = field(default_factory=lambda: TargetConf(name=OWN_TARGET))
    tree: TreeConf = field(default_factory=TreeConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    evaluation: EvaluationConf = field(default_factory=EvaluationConf)
    output_dir: str = "outputs/infer.eval"
    run_name: str = "eval"

    def __post_init__(self) -> None:
        self.checkpoint = parse_checkpoints(self.checkpoint)


@dataclass(kw_only=True)
class CalibrateConf:
    """The configuration of `python -m infer.calibrate`: a search for a draft's best static tree."""

    checkpoint: str | None = None  # null = the newest finished training run
    nodes: int = 24  # of the tree, without the root
    depth: int = 4  # deepest node
    ranks: int = 10  # candidates measured at each depth
    # as evaluation.prompts; null = the prompts by which training selected the best checkpoint, or,
    # for the demo, prompts of its training data
    prompts: str | None = None
    num_prompts: int = 32  # of the demo
    max_new_tokens: int = 64
    tree: TreeConf = field(default_factory=TreeConf)  # to compare the result with
    target: TargetConf = field(default_factory=lambda: TargetConf(name=OWN_TARGET))
    device: DeviceConf = field(default_factory=DeviceConf)
    output: str = "tree.json"  # a tree.file for tree=static
    output_dir: str = "outputs/infer.calibrate"
    run_name: str = "calibrate"

    def __post_init__(self) -> None:
        for key in ("nodes", "depth", "ranks", "num_prompts", "max_new_tokens"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}: must be at least 1, got {getattr(self, key)}")
        if self.ranks > MAX_RANKS:  # every draft vocabulary keeps the 256 bytes
            raise UserError(f"ranks: must be at most {MAX_RANKS}, got {self.ranks}")
        num_paths = sum(self.ranks**depth for depth in range(1, self.depth + 1))
        if self.nodes > num_paths:
            raise UserError(
                f"nodes: must be at most the {num_paths} paths that depth and ranks give, "
                f"got {self.nodes}; raise depth or ranks"
            )
