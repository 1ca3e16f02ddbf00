"""Results of an evaluation: every mode over the same prompts, by draft, and the setup."""

from dataclasses import dataclass, field, replace
from typing import Any

from data.eval_prompts.contamination import Contamination
from infer.measure.intervals import Estimate
from infer.measure.records import Exactness, LosslessVerdict, PromptResult, RoundCosts
from infer.verify import TypicalRule

LOSSY_RULES = (TypicalRule.name,)


@dataclass(kw_only=True)
class RoundSplit:
    """Mean seconds of the phases of an unfused round, of the whole round, and of a fused round."""

    draft_s: float
    verify_s: float
    accept_s: float
    cache_move_s: float
    host_s: float
    round_s: float
    fused_round_s: float | None = None  # None where rounds are not fused


@dataclass(kw_only=True)
class VerifiedResult:
    """The rule that accepted draft tokens, and the comparison of the answers with the target's."""

    verification: str = "exact"  # stands for any rule that keeps the target's own answers
    exactness: Exactness = field(default_factory=Exactness)

    @property
    def is_lossy(self) -> bool:
        """Return whether verification keeps the target's distribution only approximately."""
        return self.verification in LOSSY_RULES

    @property
    def lossless(self) -> LosslessVerdict:
        """Return the verdict: `no` for a lossy rule, even where its answers happen to agree."""
        return LosslessVerdict.no if self.is_lossy else self.exactness.verdict


@dataclass(kw_only=True)
class ModeResult(VerifiedResult):
    """The result of one mode over all prompts.

    `draft_passes` is the number of consecutive forward passes of the draft in a round (L in
    `mbsu`), 0 for n-gram lookup; `bottleneck` is a sentence on what limits the speed-up.
    """

    prompt_results: list[PromptResult]
    costs: RoundCosts | None = None
    graphs_after_warmup: int | None = None
    batch: int = 1
    draft_passes: int | None = None
    split: RoundSplit | None = None
    bottleneck: str | None = None

    def select_prompts(self, prompt_ids: set[str]) -> "ModeResult":
        """Return a copy for these prompts alone; the bottleneck, of all prompts, is dropped."""
        return replace(
            self,
            prompt_results=[r for r in self.prompt_results if r.prompt_id in prompt_ids],
            exactness=self.exactness.select_prompts(prompt_ids),
            bottleneck=None,
        )


@dataclass(kw_only=True)
class NotMeasured:
    """A mode that could not be run, with the reason; the report holds null and the reason."""

    reason: str

    def select_prompts(self, prompt_ids: set[str]) -> "NotMeasured":  # noqa: ARG002
        return self


ModeOutcome = ModeResult | NotMeasured


@dataclass(kw_only=True)
class DraftMemory:
    """Bytes that a draft needs besides its target: its weights, and its state for one row."""

    weights: int
    state: int


@dataclass(kw_only=True)
class AdaptedTarget:
    """A target that a draft's method adapted; it verifies the draft and is its baseline."""

    name: str
    num_parameters: int
    adapted_from: str
    autoregressive: ModeResult
    weight_bytes: int | None = None

    def select_prompts(self, prompt_ids: set[str]) -> "AdaptedTarget":
        return replace(self, autoregressive=self.autoregressive.select_prompts(prompt_ids))

    def count_changed_answers(self, original: ModeResult) -> int:
        """Count the prompts whose answers differ from those of the original target."""
        answers = {result.prompt_id: result.ids for result in original.prompt_results}
        return sum(
            result.ids != answers[result.prompt_id] for result in self.autoregressive.prompt_results
        )


@dataclass(kw_only=True)
class BatchResult(VerifiedResult):
    """The result of one mode of a draft with `batch` rows decoded together.

    The speed-up is over autoregressive decoding with as many rows.
    """

    batch: int
    mode: str
    speedup: Estimate
    tokens_per_s: Estimate
    autoregressive_tokens_per_s: Estimate
    acceptance_length: Estimate


@dataclass(kw_only=True)
class ReplayResult:
    """Acceptance lengths on the target's own text.

    `tau` is over the rounds that decoding would have, `all_positions` over rounds from every token.
    """

    tau: Estimate
    all_positions: Estimate


@dataclass(kw_only=True)
class TextSpan:
    """A span of text of one origin."""

    text: str
    kind: str  # prompt, accepted (a draft token) or target (the target's own)


@dataclass(kw_only=True)
class SampleAnswer:
    """An answer of the report, as spans of text."""

    prompt_id: str
    mode: str
    pieces: list[TextSpan]


@dataclass(kw_only=True)
class DraftResult:
    """The results of one draft: before distillation, and after it as a chain and as a tree."""

    name: str
    method: str
    num_parameters: int
    memory: DraftMemory
    untrained: ModeOutcome
    chain: ModeOutcome
    tree: ModeOutcome
    target: AdaptedTarget | None = None
    contamination: Contamination | None = None
    replay_result: ReplayResult | None = None
    batch_results: list[BatchResult] = field(default_factory=list)
    samples: list[SampleAnswer] = field(default_factory=list)
    longest_row: int | None = None  # tokens of the longest row that it was trained on

    @property
    def modes(self) -> dict[str, ModeOutcome]:
        adapted = {"autoregressive": self.target.autoregressive} if self.target else {}
        return adapted | {"untrained": self.untrained, "chain": self.chain, "tree": self.tree}

    def select_prompts(self, prompt_ids: set[str]) -> "DraftResult":
        """Return a copy whose modes hold these prompts alone."""
        return replace(
            self,
            untrained=self.untrained.select_prompts(prompt_ids),
            chain=self.chain.select_prompts(prompt_ids),
            tree=self.tree.select_prompts(prompt_ids),
            target=self.target and self.target.select_prompts(prompt_ids),
        )


@dataclass(kw_only=True)
class EvalSetup:
    """The setup of an evaluation: everything that a reader needs to repeat it.

    `device` comes from `Device.describe` (name, kind, dtype, threads, compiled), `tree` from
    `Tree.describe` (kind, depth, nodes, copied).
    """

    command: str
    versions: dict[str, str]
    device: dict[str, Any]
    target: str
    target_parameters: int
    prompts_sha256: str
    max_new_tokens: int
    sampling: dict[str, Any]
    tree: dict[str, Any]
    target_weight_bytes: int | None = None
    prompts_source: str = "the demo's"
    num_templated_prompts: int = 0  # prompts rendered by a chat template
    graphs: dict[str, dict[str, int]] | None = None  # by function; None where nothing is compiled
