"""What was recorded of decoding, and what can be read off it by counting.

Figures with intervals are in `infer.measure.metrics`. `docs/report.md` defines all of them.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from itertools import pairwise

import numpy as np

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.decode import Decoded


@dataclass(kw_only=True)
class Trace:
    """One prompt decoded in one mode.

    The first new token comes from the prefill; round r emits `accepted[r]` draft tokens and one of
    the target's own. `ids` is cut at the end of the answer, `accepted` is not: it says what the
    verifier accepted, also past the cut. The turns of a conversation share their `question`.
    """

    prompt_id: str
    category: str
    ids: list[int]
    accepted: list[int]
    drafted: list[int]
    depth: int
    prefill_s: float
    round_s: list[float]
    question: str = ""  # empty: the prompt's id
    turn: int = 0
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.question = self.question or self.prompt_id

    @classmethod
    def of(cls, prompt: EvalPrompt, answer: Decoded, *, depth: int) -> "Trace":
        """Of a prompt that was decoded alone."""
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
    def decoded(self) -> int:
        """Tokens kept of the rounds."""
        return len(self.ids) - 1

    @property
    def decode_s(self) -> float:
        return sum(self.round_s, 0.0)

    @property
    def e2e_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(kw_only=True)
class Divergence:
    """A token that the target would not have emitted, and by how much it preferred its own."""

    prompt_id: str
    position: int
    logit_gap: float


class Verdict(StrEnum):
    """Whether answers are the target's own."""

    yes = auto()
    no = auto()
    undecided = auto()  # rounding moves logits by more than the precision explains


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What the divergences of one target are held against, in logits.

    `near_tie_gap` is what rounding may close between two logits, as measured on some prompts;
    `explained_gap` is the widest that the precision explains. `exact_arithmetic` (fp32) allows no
    divergence at all.
    """

    near_tie_gap: float = 0.0
    explained_gap: float = 0.0
    exact_arithmetic: bool = True

    @property
    def explained(self) -> bool:
        return self.near_tie_gap <= self.explained_gap


@dataclass(kw_only=True)
class Exactness:
    """Where a mode emitted what the target would not have, reading its answers token by token."""

    divergences: list[Divergence] = field(default_factory=list)
    yardstick: Yardstick = field(default_factory=Yardstick)

    @property
    def mismatched_prompts(self) -> int:
        return len({divergence.prompt_id for divergence in self.divergences})

    @property
    def divergences_beyond_gap(self) -> int:
        gap = self.yardstick.near_tie_gap
        return sum(divergence.logit_gap > gap for divergence in self.divergences)

    @property
    def verdict(self) -> Verdict:
        """A gap that the precision does not explain decides nothing, for or against."""
        if self.yardstick.exact_arithmetic and self.divergences:
            return Verdict.no
        if not self.yardstick.explained:
            return Verdict.undecided
        return Verdict.no if self.divergences_beyond_gap else Verdict.yes

    def among(self, prompt_ids: Collection[str]) -> "Exactness":
        """The same, of these prompts alone."""
        return replace(self, divergences=[d for d in self.divergences if d.prompt_id in prompt_ids])


@dataclass(kw_only=True)
class Costs:
    """Seconds of one round's drafting, of its verification, and of one autoregressive step."""

    draft_s: float
    verify_s: float
    step_s: float

    def predicted_speedup(self, acceptance_length: float) -> float:
        """The speed-up of a loop that does nothing but draft and verify."""
        return acceptance_length * self.step_s / (self.draft_s + self.verify_s)


@dataclass(kw_only=True)
class Positions:
    """Acceptance at position 1, 2, ...: of all rounds, of those that accepted the one before."""

    marginal: list[float]
    conditional: list[float | None]


@dataclass(kw_only=True)
class Percentiles:
    p50: float
    p90: float
    p99: float


def drafts_trees(traces: list[Trace]) -> bool:
    """Whether some round proposed more nodes than the mode is deep."""
    return any(max(trace.drafted, default=0) > trace.depth for trace in traces)


def by_position(traces: list[Trace]) -> Positions:
    """How often rounds accept at least 1, 2, ... draft tokens.

    >>> two_rounds = Trace(prompt_id="a", category="code", ids=[0] * 5, accepted=[2, 0],
    ...                    drafted=[2, 2], depth=2, prefill_s=0.1, round_s=[0.1, 0.1])
    >>> by_position([two_rounds])
    Positions(marginal=[0.5, 0.5], conditional=[0.5, 1.0])
    """
    accepted = np.array([count for trace in traces for count in trace.accepted])
    depth = max((trace.depth for trace in traces), default=0)
    reached = [int((accepted >= position).sum()) for position in range(depth + 1)]
    return Positions(
        marginal=[count / max(1, reached[0]) for count in reached[1:]],
        conditional=[after / before if before else None for before, after in pairwise(reached)],
    )


def itl_s(trace: Trace) -> float | None:
    """Inter-token latency, (E2E - TTFT) / (tokens - 1): a mean, as rounds arrive whole."""
    return trace.decode_s / trace.decoded if trace.decoded else None


def percentiles_ms(seconds: list[float | None]) -> Percentiles | None:
    """Percentiles over prompts, in milliseconds."""
    known = [1000 * value for value in seconds if value is not None]
    if not known:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(known, [50, 90, 99]))
    return Percentiles(p50=p50, p90=p90, p99=p99)


def loops(ids: list[int], *, width: int = 8, times: int = 3) -> bool:
    """Whether some run of `width` tokens occurs `times` times: such text is easy to draft.

    >>> loops([1, 2] * 10), loops(list(range(20)))
    (True, False)
    """
    runs = Counter(tuple(ids[start : start + width]) for start in range(len(ids) - width + 1))
    return max(runs.values(), default=0) >= times


def loop_share(traces: list[Trace]) -> float:
    """The share of answers that loop."""
    return sum(loops(trace.ids) for trace in traces) / len(traces)
