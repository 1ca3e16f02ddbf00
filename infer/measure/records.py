"""Records of decoding, and the metrics that follow from them by counting.

Metrics with intervals are in `infer/measure/metrics.py`. `docs/report.md` defines all of them.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from itertools import pairwise

import numpy as np

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Generation


@dataclass(kw_only=True)
class PromptResult:
    """The result of decoding one prompt in one mode.

    The first new token comes from the prefill; round r emits `accepted[r]` draft tokens and one
    token of the target. `ids` is truncated at the end of the answer. `accepted` is not: it counts
    everything that verification accepted, also past the end. The turns of a conversation share
    their `question`.
    """

    prompt_id: str
    category: str
    ids: list[int]
    accepted: list[int]
    drafted: list[int]
    depth: int
    prefill_s: float
    round_s: list[float]
    question: str = ""  # the prompt's id where empty
    turn: int = 0
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.question = self.question or self.prompt_id

    @classmethod
    def from_generation(
        cls, prompt: EvalPrompt, answer: Generation, *, depth: int
    ) -> "PromptResult":
        """Build the result of a prompt that was decoded alone: its round times are whole rounds."""
        return cls(
            prompt_id=prompt.id,
            category=prompt.category,
            question=prompt.question,
            turn=prompt.turn,
            prompt_tokens=len(prompt.ids),
            ids=answer.ids,
            accepted=answer.accepted,
            drafted=answer.drafted,
            depth=depth,
            prefill_s=answer.prefill_s,
            round_s=answer.round_s,
        )

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def decoded_tokens(self) -> int:
        """Return the number of tokens that rounds added to the answer."""
        return len(self.ids) - 1

    @property
    def decode_s(self) -> float:
        return sum(self.round_s, 0.0)

    @property
    def e2e_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(kw_only=True)
class Mismatch:
    """A token that the target would not have emitted.

    `logit_gap` is how much higher the target rated its own choice.
    """

    prompt_id: str
    position: int
    logit_gap: float


class LosslessVerdict(StrEnum):
    """The verdict on whether a mode's answers equal the target's own."""

    yes = auto()
    no = auto()
    undecided = auto()  # logits move by more than the precision explains


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

    @property
    def is_explained(self) -> bool:
        return self.near_tie_gap <= self.explained_gap


@dataclass(kw_only=True)
class Exactness:
    """The mismatches of a mode's answers with the target, which rereads them token by token."""

    mismatches: list[Mismatch] = field(default_factory=list)
    tolerance: LogitTolerance = field(default_factory=LogitTolerance)

    @property
    def mismatched_prompts(self) -> int:
        return len({mismatch.prompt_id for mismatch in self.mismatches})

    @property
    def mismatches_beyond_gap(self) -> int:
        gap = self.tolerance.near_tie_gap
        return sum(mismatch.logit_gap > gap for mismatch in self.mismatches)

    @property
    def verdict(self) -> LosslessVerdict:
        """Return the verdict; a gap that the precision does not explain leaves it undecided."""
        if self.tolerance.exact_arithmetic and self.mismatches:
            return LosslessVerdict.no
        if not self.tolerance.is_explained:
            return LosslessVerdict.undecided
        return LosslessVerdict.no if self.mismatches_beyond_gap else LosslessVerdict.yes

    def select_prompts(self, prompt_ids: Collection[str]) -> "Exactness":
        """Return a copy that holds the mismatches of these prompts alone."""
        return replace(self, mismatches=[m for m in self.mismatches if m.prompt_id in prompt_ids])


@dataclass(kw_only=True)
class RoundCosts:
    """Seconds that a round drafts and verifies, and seconds of an autoregressive step."""

    draft_s: float
    verify_s: float
    step_s: float

    def predicted_speedup(self, acceptance_length: float) -> float:
        """Return the speed-up of a loop that does nothing but draft and verify."""
        return acceptance_length * self.step_s / (self.draft_s + self.verify_s)


@dataclass(kw_only=True)
class PositionAcceptance:
    """Acceptance at position 1, 2, ....

    `marginal` is the share of all rounds, `conditional` the share of the rounds that accepted the
    position before (None where there is no such round).
    """

    marginal: list[float]
    conditional: list[float | None]


@dataclass(kw_only=True)
class Percentiles:
    p50: float
    p90: float
    p99: float


def has_tree_rounds(results: list[PromptResult]) -> bool:
    """Return whether a round proposed more nodes than the mode is deep."""
    return any(max(result.drafted, default=0) > result.depth for result in results)


def acceptance_by_position(results: list[PromptResult]) -> PositionAcceptance:
    """Compute the shares of rounds that accept at least 1, 2, ... draft tokens.

    >>> two_rounds = PromptResult(
    ...     prompt_id="a", category="code", ids=[0] * 5, accepted=[2, 0], drafted=[2, 2], depth=2,
    ...     prefill_s=0.1, round_s=[0.1, 0.1],
    ... )
    >>> acceptance_by_position([two_rounds])
    PositionAcceptance(marginal=[0.5, 0.5], conditional=[0.5, 1.0])
    """
    accepted = np.array([count for result in results for count in result.accepted])
    depth = max((result.depth for result in results), default=0)
    reached = [int((accepted >= position).sum()) for position in range(depth + 1)]
    return PositionAcceptance(
        marginal=[count / max(1, reached[0]) for count in reached[1:]],
        conditional=[after / before if before else None for before, after in pairwise(reached)],
    )


def inter_token_latency(result: PromptResult) -> float | None:
    """Return the inter-token latency in seconds, (E2E - TTFT) / (tokens - 1).

    It is a mean, because all tokens of a round arrive at once. None for an answer of one token.
    """
    return result.decode_s / result.decoded_tokens if result.decoded_tokens else None


def percentiles_in_ms(seconds: list[float | None]) -> Percentiles | None:
    """Return percentiles over prompts, in milliseconds; None where no prompt has a value."""
    milliseconds = [1000 * value for value in seconds if value is not None]
    if not milliseconds:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(milliseconds, [50, 90, 99]))
    return Percentiles(p50=p50, p90=p90, p99=p99)


def is_looping(ids: list[int], *, width: int = 8, times: int = 3) -> bool:
    """Return whether a window of `width` tokens occurs `times` times: such text is easy to draft.

    >>> is_looping([1, 2] * 10), is_looping(list(range(20)))
    (True, False)
    """
    windows = Counter(tuple(ids[start : start + width]) for start in range(len(ids) - width + 1))
    return max(windows.values(), default=0) >= times


def loop_share(results: list[PromptResult]) -> float:
    """Return the share of answers that loop."""
    return sum(is_looping(result.ids) for result in results) / len(results)
