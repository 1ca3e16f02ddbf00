"""Records of an evaluation: the answers of each mode to all prompts, and how they were judged."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.requests import Generation
from infer.results.schema import LosslessVerdict, Mismatch, PromptFigures, RoundSplit, Verdict
from infer.verify.config import Verification

AUTOREGRESSIVE = "autoregressive"  # the mode of the target alone


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """A prompt and its answer in one mode."""

    prompt: EvalPrompt
    generation: Generation

    @cached_property
    def figures(self) -> PromptFigures:
        """Return the numbers of the answer; the inter-token latency is (E2E - TTFT) / (tokens - 1).

        That latency is a mean, because all tokens of a round arrive at once. It is None for an answer of one token.
        """
        answer = self.generation
        ttft_ms, decode_ms = 1000 * answer.prefill_s, 1000 * sum(answer.share_s)
        return PromptFigures(
            tokens=len(answer.ids),
            rounds=answer.rounds,
            accepted=sum(answer.accepted),
            drafted=sum(answer.drafted),
            ttft_ms=ttft_ms,
            itl_ms=decode_ms / answer.decoded_tokens if answer.decoded_tokens else None,
            e2e_ms=ttft_ms + decode_ms,
        )


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
        lossy = not Verification(verification).is_lossless
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


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """The result of one mode; all modes hold the same prompts in the same order.

    `baseline` is the key of the autoregressive mode of the same target, `depth` that of the mode's trees.
    """

    prompt_results: list[PromptResult]
    baseline: str = AUTOREGRESSIVE
    depth: int
    verification: str = Verification.greedy.value
    exactness: Exactness = field(default_factory=Exactness)
    split: RoundSplit | None = None
    draft_passes: int | None = None

    @property
    def figures(self) -> list[PromptFigures]:
        return [result.figures for result in self.prompt_results]

    @property
    def questions(self) -> list[str]:
        return [result.prompt.question for result in self.prompt_results]

    @property
    def nodes(self) -> int:
        """Return the most draft tokens that a round proposed."""
        return max(max(r.generation.drafted, default=0) for r in self.prompt_results)

    def select_category(self, category: str) -> "ModeResult":
        """Return a copy with only the prompts of a category."""
        results = [result for result in self.prompt_results if result.prompt.category == category]
        ids = {result.prompt.id for result in results}
        mismatches = [m for m in self.exactness.mismatches if m.prompt_id in ids]
        exactness = replace(self.exactness, mismatches=mismatches)
        return replace(self, prompt_results=results, exactness=exactness)
