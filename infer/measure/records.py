"""Records of an evaluation: the answers of a mode to all prompts, and the modes of a draft."""

from dataclasses import dataclass, field, replace

from data.eval_prompts.prompts import EvalPrompt
from infer.config import Verification
from infer.engine.requests import Generation
from infer.measure.report_schema import (
    BatchSection,
    CurvePoint,
    DraftMemory,
    LosslessVerdict,
    Mismatch,
    ReplayResult,
    RoundCosts,
    RoundSplit,
    SampleAnswer,
    TargetInfo,
    Verdict,
)

LOSSY_RULES = tuple(rule.value for rule in Verification if not rule.is_lossless)


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """A prompt and its answer in one mode, whose trees are `depth` levels deep."""

    prompt: EvalPrompt
    generation: Generation
    depth: int


@dataclass(frozen=True, kw_only=True)
class LogitTolerance:
    """The tolerance, in logits, for mismatches with one target.

    `near_tie_gap` is the widest gap between two logits that rounding may close, as measured on a
    few prompts; `explained_gap` is the widest gap that the precision explains. With
    `exact_arithmetic` (fp32) no mismatch is allowed at all.
    """

    near_tie_gap: float = 0.0
    explained_gap: float = 0.0
    exact_arithmetic: bool = True


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """The mismatches of a mode's answers with the target, which rereads them token by token."""

    mismatches: list[Mismatch] = field(default_factory=list)
    tolerance: LogitTolerance = field(default_factory=LogitTolerance)

    @property
    def mismatches_beyond_gap(self) -> int:
        return sum(m.logit_gap > self.tolerance.near_tie_gap for m in self.mismatches)

    @property
    def verdict(self) -> LosslessVerdict:
        """Return the verdict; a gap that the precision does not explain leaves it undecided."""
        tolerance = self.tolerance
        if tolerance.exact_arithmetic and self.mismatches:
            return LosslessVerdict.no
        if tolerance.near_tie_gap > tolerance.explained_gap:
            return LosslessVerdict.undecided
        return LosslessVerdict.no if self.mismatches_beyond_gap else LosslessVerdict.yes

    def judge(self, verification: str) -> Verdict:
        """Return the verdict on a rule: `no` for a lossy one, even if its answers agree."""
        lossy = verification in LOSSY_RULES
        return Verdict(
            verification=verification,
            lossy=lossy,
            lossless=LosslessVerdict.no if lossy else self.verdict,
            mismatched_prompts=len({mismatch.prompt_id for mismatch in self.mismatches}),
            near_tie_gap=self.tolerance.near_tie_gap,
            explained_gap=self.tolerance.explained_gap,
            divergences_beyond_gap=self.mismatches_beyond_gap,
            divergences=self.mismatches,
        )


@dataclass(kw_only=True)
class ModeResult:
    """The result of one mode over all prompts; the report describes the other fields."""

    prompt_results: list[PromptResult]
    verification: str = "exact"  # stands for any rule that keeps the target's own answers
    exactness: Exactness = field(default_factory=Exactness)
    costs: RoundCosts | None = None
    graphs_after_warmup: int | None = None
    draft_passes: int | None = None
    split: RoundSplit | None = None
    bottleneck: str | None = None

    def select_category(self, category: str) -> "ModeResult":
        """Return a copy with only the prompts of a category, and without the bottleneck."""
        results = [r for r in self.prompt_results if r.prompt.category == category]
        ids = {result.prompt.id for result in results}
        exactness = replace(
            self.exactness,
            mismatches=[m for m in self.exactness.mismatches if m.prompt_id in ids],
        )
        return replace(self, prompt_results=results, exactness=exactness, bottleneck=None)


@dataclass(frozen=True, kw_only=True)
class AdaptedTarget(TargetInfo):
    """A target that a draft's method adapted; it verifies the draft and is its baseline."""

    adapted_from: str
    weight_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class DraftResult:
    """The results of one draft.

    Its modes are `untrained` (before distillation), `chain`, `tree` and perhaps `tuned`; those of a
    draft with an adapted target begin with the `autoregressive` mode of that target. `not_measured`
    has the reason for each missing mode.
    """

    name: str
    method: str
    num_parameters: int
    memory: DraftMemory
    modes: dict[str, ModeResult]
    not_measured: dict[str, str] = field(default_factory=dict)
    target: AdaptedTarget | None = None
    replay_result: ReplayResult | None = None
    batches: list[BatchSection] = field(default_factory=list)
    samples: list[SampleAnswer] = field(default_factory=list)
    longest_row: int | None = None  # tokens of the longest row that it was trained on
    tuned_tree: str | None = None  # the decoding of the mode `tuned`, in words
    curve: list[CurvePoint] = field(default_factory=list)  # of its training

    def select_category(self, category: str) -> "DraftResult":
        """Return a copy whose modes hold only the prompts of a category."""
        modes = {name: mode.select_category(category) for name, mode in self.modes.items()}
        return replace(self, modes=modes)
