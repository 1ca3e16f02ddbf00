"""Configuration of `python -m infer.tune`, and its translation into overrides of `infer.eval`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from conf.typed_text import format_overrides
from infer.config import DEMO_NEW_TOKENS, MISSING, CheckpointConf
from models.io.errors import LISTED, Rule, at_least, at_most, check_values, require
from models.io.tracking import TrackerConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import MAX_CHAIN_LENGTH

MAX_RANKS = 256  # every draft vocabulary keeps the 256 bytes
NOT_NEGATIVE = Rule("must not be negative", lambda value: value >= 0, "0 copies no tokens")
NGRAM_WINDOWS = Rule(
    f"must list numbers in 1..{MAX_CHAIN_LENGTH}",
    lambda windows: all(1 <= window <= MAX_CHAIN_LENGTH for window in windows),
    "[] leaves lookup alone out",
)


@dataclass(kw_only=True)
class TuneConf(CheckpointConf):
    """Settings of a tuning: batches and contexts, and the trees and windows to consider.

    `tree` is compared with the result.
    """

    # as evaluation.prompts; null = the prompts by which training selected the best checkpoint, or,
    # for the demo, prompts of its training data
    prompts: str | None = None
    num_prompts: int | None = None  # spread over categories; null = all, or 32 of the demo's training data
    template: dict[str, Any] = field(default_factory=dict)  # arguments of the chat template; those of a row come first
    max_new_tokens: int = DEMO_NEW_TOKENS
    timing: bool = True  # false: choose a static tree of each budget, by its acceptance alone
    ranks: int = 10  # draft candidates whose acceptance is measured at each depth
    batch: list[int] = field(default_factory=lambda: [1, 4, 16])  # batch sizes
    context: list[int] | None = None  # tokens of prompt and answer; null = what the prompts need
    depth: int = 10  # longest window, deepest node
    nodes: list[int] = field(default_factory=lambda: [4, 8, 16, 24, 32, 63])  # node budgets
    ngram_tokens: int = 8  # tokens of n-gram lookup beside the tree; 0 = none
    ngram_windows: list[int] = field(default_factory=lambda: [4, 8, 16])  # of lookup alone
    sweep: bool = False  # also measure every window and a dozen trees, to check the choice
    repeats: int = 2  # decodings of every prompt in each mode, in alternating order
    sampling: SamplingConf = field(default_factory=SamplingConf)
    log: TrackerConf = field(default_factory=TrackerConf)
    output_dir: str = "outputs/infer.tune"
    run_name: str = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values(
            self,
            depth=at_least(1),
            repeats=at_least(1),
            max_new_tokens=at_least(2),
            ngram_tokens=NOT_NEGATIVE,
            ngram_windows=NGRAM_WINDOWS,
            batch=LISTED,
            nodes=LISTED,
            context=LISTED,
            num_prompts=at_least(1, "null = all"),
            ranks=at_least(1),
        )
        check_values(self, ranks=at_most(MAX_RANKS))
        require(
            self.timing or (self.context is None and not self.sweep),
            "timing: must be true for context and sweep, which time rounds, got false; leave them out",
        )
        max_nodes = sum(self.ranks**depth for depth in range(1, self.depth + 1))
        require(
            min(self.nodes) <= max_nodes,
            f"nodes: must list a budget of at most the {max_nodes} paths that depth and ranks "
            f"give, got {self.nodes}; raise depth or ranks",
        )

    @property
    def longest_copy(self) -> int:
        """Return the most tokens that n-gram lookup copies, beside a tree or alone."""
        return max([self.ngram_tokens, *self.ngram_windows])

    def eval_overrides(self, batch: int) -> str:
        """Return the overrides, besides checkpoint and tree, that reproduce the tuning setup."""
        own, default = (asdict(conf) for conf in (self, TuneConf()))
        sections = {"target": "target", "parallel": "parallel", "device": "device", "evaluation.sampling": "sampling"}
        overrides = {
            f"{key}.{option}": value
            for key, section in sections.items()
            for option, value in own[section].items()
            if value != default[section][option]
        }
        evaluation = {"prompts": own["prompts"]} if own["prompts"] != default["prompts"] else {}
        evaluation |= {"max_new_tokens": own["max_new_tokens"]}  # an evaluation has another default
        evaluation |= {"batch_sizes": [batch]} if batch > 1 else {}
        overrides |= {f"evaluation.{key}": value for key, value in evaluation.items()}
        overrides |= {f"+evaluation.template.{key}": value for key, value in self.template.items()}
        return format_overrides(overrides)
