"""Figures of a mode with their intervals, and gains of one mode over another.

But for the mean over prompts, every figure is a ratio of sums over prompts: a long answer weighs
more than a short one, as it does on a server. Intervals are over questions: the turns of one
conversation resemble each other. `docs/report.md` defines each figure.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.measure.intervals import Estimate, bootstrap_t, ratio
from infer.measure.records import Trace, drafts_trees


@dataclass(kw_only=True)
class Figure:
    """Columns of a prompt, beside its autoregressive trace; their function; its range."""

    columns: Callable[[Trace, Trace], tuple[float, ...]]
    statistic: Callable[[ndarray], ndarray]
    support: tuple[float, float] = (0.0, np.inf)


def ratio_of_ratios(means: Float[ndarray, "... 4"]) -> Float[ndarray, "..."]:
    """Of two rates, each a ratio of sums."""
    return ratio(means[..., :2]) / ratio(means[..., 2:])


def _own_length(trace: Trace) -> tuple[float, float]:
    """The prompt's own tau, and that it has one."""
    return (sum(trace.accepted) / trace.rounds + 1, 1.0) if trace.rounds else (0.0, 0.0)


FIGURES = {
    "tokens_per_s": Figure(columns=lambda t, _: (t.decoded, t.decode_s), statistic=ratio),
    "speedup": Figure(
        columns=lambda t, plain: (t.decoded, t.decode_s, plain.decoded, plain.decode_s),
        statistic=ratio_of_ratios,
    ),
    "speedup_e2e": Figure(
        columns=lambda t, plain: (len(t.ids), t.e2e_s, len(plain.ids), plain.e2e_s),
        statistic=ratio_of_ratios,
    ),
    "acceptance_length": Figure(
        columns=lambda t, _: (sum(t.accepted) + t.rounds, t.rounds),
        statistic=ratio,
        support=(1.0, np.inf),
    ),
    "delivered_per_round": Figure(columns=lambda t, _: (t.decoded, t.rounds), statistic=ratio),
    "acceptance_length_per_prompt": Figure(
        columns=lambda t, _: _own_length(t), statistic=ratio, support=(1.0, np.inf)
    ),
    "acceptance_rate": Figure(
        columns=lambda t, _: (sum(t.accepted), sum(t.drafted)), statistic=ratio, support=(0.0, 1.0)
    ),
}
GAINS = ("acceptance_length", "acceptance_rate", "speedup")


def estimate(name: str, traces: list[Trace], autoregressive: list[Trace]) -> Estimate | None:
    """A figure of `FIGURES` with its interval; `autoregressive` holds the same prompts."""
    figure = FIGURES[name]
    rows = by_question(_rows(figure, traces, autoregressive), [t.question for t in traces])
    return bootstrap_t(rows, figure.statistic, support=figure.support)


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
    order = {trace.prompt_id: row for row, trace in enumerate(other)}
    paired = theirs[[order[trace.prompt_id] for trace in traces]]
    rows = by_question(np.hstack([ours, paired]), [trace.question for trace in traces])
    return bootstrap_t(rows, difference(figure.statistic, ours.shape[1]))


def difference(
    statistic: Callable[[ndarray], ndarray], columns: int
) -> Callable[[ndarray], ndarray]:
    """The statistic of the first columns minus that of the others."""
    return lambda means: statistic(means[..., :columns]) - statistic(means[..., columns:])


def by_question(
    rows: Float[ndarray, "prompts columns"], questions: list[str]
) -> Float[ndarray, "questions columns"]:
    """Sums over the turns of each question.

    >>> by_question(np.array([[1.0, 2.0], [5.0, 0.0], [3.0, 4.0]]), ["a", "b", "a"])
    array([[4., 6.],
           [5., 0.]])
    """
    number = {question: row for row, question in enumerate(dict.fromkeys(questions))}
    sums = np.zeros((len(number), rows.shape[1]))
    np.add.at(sums, [number[question] for question in questions], rows)
    return sums


def mbsu(acceptance_length: Estimate, *, draft_passes: int, bytes_ratio: float) -> Estimate:
    """Memory-bound speed-up: tau / (1 + c L), where a pass costs the bytes that it reads.

    >>> mbsu(Estimate(mean=3.0, ci95=[2.4, 3.6]), draft_passes=4, bytes_ratio=0.05)
    Estimate(mean=2.5, ci95=[2.0, 3.0])
    """
    cost = 1 + bytes_ratio * draft_passes
    interval = acceptance_length.ci95
    return Estimate(
        mean=acceptance_length.mean / cost, ci95=interval and [bound / cost for bound in interval]
    )


def _rows(
    figure: Figure, traces: list[Trace], autoregressive: list[Trace]
) -> Float[ndarray, "prompts columns"]:
    plain = {trace.prompt_id: trace for trace in autoregressive}
    return np.array([figure.columns(t, plain[t.prompt_id]) for t in traces], dtype=np.float64)
