"""The configuration of the commands on checkpoints, of `infer.plan`, and of an evaluation."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.config import DEMO
from infer.verify.config import Verification
from models.device.config import DeviceConf, MachineConf
from models.drafts.options import DraftConf
from models.io.errors import BELOW_ONE, POSITIVE, Rule, at_least, check_values, require
from models.io.tracking import TrackerConf
from models.parallel.config import TensorConf
from models.targets.config import TargetConf
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf

MISSING: Any = "???"  # OmegaConf's mark of a required value
DEMO_NEW_TOKENS, DEFAULT_NEW_TOKENS = 64, 256  # of answers to the demo's and to other prompts
OWN_TARGET = "own"  # a target.name: the target that the draft was distilled from
EACH_ABOVE_ONE = Rule(
    "must be 2 or more each", lambda batches: all(batch > 1 for batch in batches), "[] measures only one row at a time"
)


@dataclass(kw_only=True)
class EvaluationConf:
    """The prompts and settings of an evaluation."""

    # a file, a folder, a dataset or `demo`; null = prompts held out of the draft's training data
    prompts: str | None = None
    prompts_per_category: int | None = None  # prompts of each category; null = all
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template; those of a row come first
    turns: int = 1  # of each conversation; later turns follow the target's own answers
    max_new_tokens: int | None = None  # null = 64 for the demo's prompts, 256 for others
    sampling: SamplingConf = field(default_factory=SamplingConf)
    verification: Verification = Verification.auto
    # typical acceptance takes tokens above min(epsilon, delta * exp(-entropy))
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    batch_sizes: list[int] = field(default_factory=lambda: [8])  # batch sizes measured besides 1
    phases: bool = True  # also times the parts of a round, each of which is a graph of its own

    def __post_init__(self) -> None:
        check_values(
            self,
            "evaluation",
            max_new_tokens=at_least(2),
            prompts_per_category=at_least(1, "null = all"),
            turns=at_least(1),
            batch_sizes=EACH_ABOVE_ONE,
            typical_epsilon=POSITIVE,
            typical_delta=POSITIVE,
        )
        self.rule.check_sampling(self.sampling)

    @property
    def new_tokens(self) -> int:
        """Return the maximum number of tokens of an answer."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return DEMO_NEW_TOKENS if self.prompts in (None, DEMO) else DEFAULT_NEW_TOKENS

    @property
    def quick_tokens(self) -> int:
        """Return the maximum during training, where few tokens suffice to compare checkpoints."""
        return DEMO_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def rule(self) -> Verification:
        """Return the rule that is meant, which is never `auto`."""
        return self.verification.resolve(self.sampling)


@dataclass(kw_only=True)
class CheckpointConf:
    """The settings of every command on checkpoints: their target, a tree and the device."""

    checkpoint: Any = None  # a directory or a list of them; null = the newest finished training run
    target: TargetConf = field(default_factory=lambda: TargetConf(name=OWN_TARGET))
    tree: TreeConf = field(default_factory=TreeConf)
    parallel: TensorConf = field(default_factory=TensorConf)
    device: DeviceConf = field(default_factory=DeviceConf)

    def __post_init__(self) -> None:
        paths = [self.checkpoint] if isinstance(self.checkpoint, str) else self.checkpoint
        are_paths = isinstance(paths, list) and {str} == set(map(type, paths))
        require(paths is None or are_paths, f"checkpoint: must be a directory or a list of them, got {self.checkpoint}")
        self.checkpoint = paths


@dataclass(kw_only=True)
class EvalConf(CheckpointConf):
    """The configuration of `python -m infer.eval`; a bare call evaluates the newest finished training run."""

    evaluation: EvaluationConf = field(default_factory=EvaluationConf)
    tune: bool = False  # also measures the decoding that is fastest here, beside `tree`
    log: TrackerConf = field(default_factory=TrackerConf)
    output_dir: str = "outputs/infer.eval"
    run_name: str = MISSING


@dataclass(kw_only=True)
class GenerateConf(CheckpointConf):
    """The configuration of `python -m infer.generate`: one prompt, or a file of prompts."""

    checkpoint: str | None = None  # null = the newest finished training run
    prompt: str | None = None  # a user's message; the answer is printed while it grows
    prompts: str | None = None  # as evaluation.prompts; the answers are written to a file
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template; those of a row come first
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    stop: list[str] = field(default_factory=list)  # strings that end an answer
    sampling: SamplingConf = field(default_factory=SamplingConf)
    batch: int = 8  # prompts of a file that are decoded together
    output_dir: str = "outputs/infer.generate"
    run_name: str = MISSING
    output: str | None = None  # JSONL of the answers; null = answers.jsonl in the run's folder, with prompts=FILE alone

    def __post_init__(self) -> None:
        check_values(self, max_new_tokens=at_least(1), batch=at_least(1))
        require(
            all(self.stop),
            f"stop: must be strings that are not empty, which would end each answer, got {self.stop}; leave out ''",
        )
        require(
            (self.prompt is None) != (self.prompts is None),
            "prompt: needs a text, or prompts=FILE in its place, got "
            f"{'neither' if self.prompt is None else 'both'}; set one of them",
        )
        require(
            self.prompts is None or self.output is None or Path(self.output).resolve() != Path(self.prompts).resolve(),
            f"output: must be another file than that of the prompts, got {self.output}; choose another name",
        )
        require(
            self.prompt is None or bool(self.prompt.strip()),
            f"prompt: must have a character that is not white space, got {self.prompt!r}; write "
            "what the target is to answer",
        )

    @property
    def answers_file(self) -> str | None:
        """Return the path that the answers are written to, or None for one that is only printed."""
        if self.output is None and self.prompts is not None:
            return f"{self.output_dir}/{self.run_name}/answers.jsonl"
        return self.output


@dataclass(kw_only=True)
class DecodePlanConf:
    """The configuration of `python -m infer.plan`: models, decoding and machine."""

    target: TargetConf = field(default_factory=TargetConf)
    draft: DraftConf = MISSING
    tree: TreeConf = field(default_factory=TreeConf)
    sampling: SamplingConf = field(default_factory=SamplingConf)
    device: DeviceConf = field(default_factory=DeviceConf)
    machine: MachineConf = field(default_factory=MachineConf)
    batch: int = 1
    prompt_tokens: int = 1024
    context: int = 2048  # tokens of prompt and answer
    memory_margin: float = 0.1  # share of a core's memory kept for compiler, runtime, collectives
    output: str | None = None  # a file for the plan as JSON
    output_dir: str = "outputs/infer.plan"
    run_name: str = MISSING

    def __post_init__(self) -> None:
        check_values(self, batch=at_least(1), prompt_tokens=at_least(1), memory_margin=BELOW_ONE)
        require(
            self.context > self.prompt_tokens,
            f"context: must be more than the {self.prompt_tokens} tokens of the prompt, got "
            f"{self.context}; raise it or lower prompt_tokens",
        )
