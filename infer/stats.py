"""What decoding traces say: acceptance, speed and latency of one mode, and its gain over another.

Every figure is a ratio of sums over prompts: a long answer weighs more than a short one, as it does
on a server. `docs/report.md` defines each of them.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.intervals import Estimate, bootstrap_t, ratio


@dataclass(kw_only=True)
class Trace:
    """One prompt decoded in one mode.

    The first new token comes from the prefill; round r emits `accepted[r]` draft tokens and one of
    the target's own. `ids` is cut at the end of the answer, `accepted` is not: it says what the
    verifier accepted, also past the cut.
    """

    prompt_id: str
    category: str
    ids: list[int]
    accepted: list[int]
    drafted: list[int]
    depth: int
    prefill_s: float
    round_s: list[float]

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


@dataclass(kw_only=True)
class Exactness:
    """Where a mode emitted what the target would not have, reading its answers token by token.

    `near_tie_gap` is measured on calibration prompts; `exact_arithmetic` (fp32) allows no
    divergence at all.
    """

    divergences: list[Divergence] = field(default_factory=list)
    near_tie_gap: float = 0.0
    exact_arithmetic: bool = True

    @property
    def mismatched_prompts(self) -> int:
        return len({divergence.prompt_id for divergence in self.divergences})

    @property
    def divergences_beyond_gap(self) -> int:
        return sum(divergence.logit_gap > self.near_tie_gap for divergence in self.divergences)

    @property
    def lossless(self) -> bool:
        return not (self.divergences if self.exact_arithmetic else self.divergences_beyond_gap)

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


@dataclass(kw_only=True)
class Figure:
    """Columns of a prompt, beside its autoregressive trace; their function; its range."""

    columns: Callable[[Trace, Trace], tuple[float, ...]]
    statistic: Callable[[ndarray], ndarray]
    support: tuple[float, float] = (0.0, np.inf)


def _ratio_of_ratios(means: Float[ndarray, "... 4"]) -> Float[ndarray, "..."]:
    return ratio(means[..., :2]) / ratio(means[..., 2:])


FIGURES = {
    "tokens_per_s": Figure(columns=lambda t, _: (t.decoded, t.decode_s), statistic=ratio),
    "speedup": Figure(
        columns=lambda t, plain: (t.decoded, t.decode_s, plain.decoded, plain.decode_s),
        statistic=_ratio_of_ratios,
    ),
    "speedup_e2e": Figure(
        columns=lambda t, plain: (len(t.ids), t.e2e_s, len(plain.ids), plain.e2e_s),
        statistic=_ratio_of_ratios,
    ),
    "acceptance_length": Figure(
        columns=lambda t, _: (sum(t.accepted) + t.rounds, t.rounds),
        statistic=ratio,
        support=(1.0, np.inf),
    ),
    "acceptance_rate": Figure(
        columns=lambda t, _: (sum(t.accepted), sum(t.drafted)), statistic=ratio, support=(0.0, 1.0)
    ),
}
GAINS = ("acceptance_length", "acceptance_rate", "speedup")


def estimate(name: str, traces: list[Trace], autoregressive: list[Trace]) -> Estimate | None:
    """A figure of `FIGURES` with its interval; `autoregressive` holds the same prompts."""
    figure = FIGURES[name]
    return bootstrap_t(
        _rows(figure, traces, autoregressive), figure.statistic, support=figure.support
    )


def gain(
    name: str, traces: list[Trace], other: list[Trace], autoregressive: list[Trace],
    others_autoregressive: list[Trace] | None = None,
) -> Estimate | None:  # fmt: skip
    """The figure of `traces` minus that of `other`, paired by prompt.

    `others_autoregressive` is what `other` is compared with, where that is not the same target.
    None for the acceptance rate of a tree beside a chain: siblings exclude each other, so a tree's
    is lower by construction.
    """
    if name == "acceptance_rate" and drafts_trees(traces) != drafts_trees(other):
        return None
    figure = FIGURES[name]
    ours = _rows(figure, traces, autoregressive)
    theirs = _rows(figure, other, others_autoregressive or autoregressive)
    columns = ours.shape[1]

    def difference(means: Float[ndarray, "... columns"]) -> Float[ndarray, "..."]:
        return figure.statistic(means[..., :columns]) - figure.statistic(means[..., columns:])

    order = {trace.prompt_id: row for row, trace in enumerate(other)}
    paired = theirs[[order[trace.prompt_id] for trace in traces]]
    return bootstrap_t(np.hstack([ours, paired]), difference)


def _rows(
    figure: Figure, traces: list[Trace], autoregressive: list[Trace]
) -> Float[ndarray, "prompts columns"]:
    plain = {trace.prompt_id: trace for trace in autoregressive}
    return np.array([figure.columns(t, plain[t.prompt_id]) for t in traces], dtype=np.float64)


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
