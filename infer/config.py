"""What `python -m infer.eval` takes, and the evaluation that ends a training run."""

from dataclasses import dataclass, field
from typing import Any

from data.config import DEMO
from infer.verify import Typical, Verification, Verifier, build
from models.device import DeviceConf
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import TreeConf
from models.target.target import TargetConf

MOST_RANKS = 256
DEMO_TOKENS, OWN_TOKENS = 64, 256  # of an answer to the demo's prompts, and to others
OWN = "own"  # as target.name: the target that the draft was distilled from


@dataclass(kw_only=True)
class EvaluationConf:
    """On which prompts a draft is judged, and how."""

    # a file, a folder, a dataset or `demo`; null = those that the draft's run held out of its data
    prompts: str | None = None
    limit: int | None = None  # prompts of each category; null = all
    turns: int = 1  # of each conversation, later ones behind the target's own answers
    max_new_tokens: int | None = None  # null = 64 for the demo's prompts, 256 for others
    sampling: SamplingConf = field(default_factory=SamplingConf)
    verification: Verification = Verification.auto
    typical_epsilon: float = 0.09  # likely enough at any rate
    typical_delta: float = 0.3  # likely enough times exp(entropy)
    batches: list[int] = field(default_factory=lambda: [8])  # rows at a time, beside one alone
    replay: bool = False  # also every start of the target's own text, decoding nothing

    def __post_init__(self) -> None:
        if self.new_tokens < 2:
            raise UserError(
                f"evaluation.max_new_tokens: must be at least 2, got {self.max_new_tokens}"
            )
        if self.limit is not None and self.limit < 1:
            raise UserError(f"evaluation.limit: must be at least 1, got {self.limit}; null = all")
        if self.replay and (self.verifier.ratio or not self.verifier.lossless):
            raise UserError(
                "evaluation.replay: needs greedy or coupled verification, whose answers do not "
                f"depend on the draft, got {self.verifier.name}; set it to false"
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
        _ = self.verifier  # refuses what does not go with the sampling

    @property
    def new_tokens(self) -> int:
        """Tokens of an answer at most."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return DEMO_TOKENS if self.prompts in (None, DEMO) else OWN_TOKENS

    @property
    def quick_tokens(self) -> int:
        """The same while a draft is trained: few tokens tell checkpoints apart."""
        return DEMO_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def verifier(self) -> Verifier:
        """What `Decoder` takes as `verification`."""
        typical = Typical(epsilon=self.typical_epsilon, delta=self.typical_delta)
        return build(self.verification, self.sampling, typical=typical)


def listed_checkpoints(given: Any) -> list[str] | None:
    """One directory or several, as a list; None: the newest finished run."""
    listed = [given] if isinstance(given, str) else given
    if given is None or (isinstance(listed, list) and listed and {str} == set(map(type, listed))):
        return listed
    raise UserError(f"checkpoint: must be a directory or a list of them, got {given}")


@dataclass(kw_only=True)
class EvalConf:
    """`python -m infer.eval`. A bare call evaluates the newest finished training run."""

    checkpoint: Any = None  # a directory, or a list of them
    target: TargetConf = field(default_factory=lambda: TargetConf(name=OWN))
    tree: TreeConf = field(default_factory=TreeConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    evaluation: EvaluationConf = field(default_factory=EvaluationConf)
    output_dir: str = "outputs/infer.eval"
    run_name: str = "eval"

    def __post_init__(self) -> None:
        self.checkpoint = listed_checkpoints(self.checkpoint)


@dataclass(kw_only=True)
class CalibrateConf:
    """`python -m infer.calibrate`: the static tree of `nodes` nodes that fits a draft."""

    checkpoint: str | None = None  # null = the newest finished training run
    nodes: int = 24  # of the tree to find, the root not counted
    depth: int = 4  # deepest node
    ranks: int = 10  # candidates measured at each depth
    # as evaluation.prompts; null = those that chose the checkpoint, or some that the demo trains on
    prompts: str | None = None
    num_prompts: int = 32  # of the demo's
    max_new_tokens: int = 64
    tree: TreeConf = field(default_factory=TreeConf)  # to compare the found one with
    target: TargetConf = field(default_factory=lambda: TargetConf(name=OWN))
    device: DeviceConf = field(default_factory=DeviceConf)
    output: str = "tree.json"  # what tree=static takes as tree.file
    output_dir: str = "outputs/infer.calibrate"
    run_name: str = "calibrate"

    def __post_init__(self) -> None:
        for key in ("nodes", "depth", "ranks", "num_prompts", "max_new_tokens"):
            if getattr(self, key) < 1:
                raise UserError(f"{key}: must be at least 1, got {getattr(self, key)}")
        if self.ranks > MOST_RANKS:  # no draft vocabulary has fewer tokens: it keeps all bytes
            raise UserError(f"ranks: must be at most {MOST_RANKS}, got {self.ranks}")
        most = sum(self.ranks**depth for depth in range(1, self.depth + 1))
        if self.nodes > most:
            raise UserError(
                f"nodes: must be at most the {most} paths that depth and ranks give, "
                f"got {self.nodes}; raise depth or ranks"
            )
