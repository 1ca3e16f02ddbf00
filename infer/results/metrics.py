"""Define every metric once, with its interval; compute gains of one mode over another.

Intervals are over questions, because the turns of one conversation resemble each other. `docs/report.md` defines each
metric.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.results.intervals import Estimate, Statistic, bootstrap_t, ratio_of_means
from infer.results.records import ModeResult
from infer.results.schema import Percentiles, PositionAcceptance, PromptFigures


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The definition of a metric.

    `columns` computes a row from a prompt's figures in a mode and in its autoregressive mode,
    `statistic` the metric from the means of the columns; `support` is the range of its values.
    """

    columns: Callable[[PromptFigures, PromptFigures], tuple[float, ...]]
    statistic: Statistic = ratio_of_means
    support: tuple[float, float] = (0.0, np.inf)

    def collect_rows(
        self, figures: Sequence[PromptFigures], baseline: Sequence[PromptFigures], questions: Sequence[str]
    ) -> Float[ndarray, "questions columns"]:
        """Return the columns of each question; the figures are of the same prompts in order."""
        rows = [self.columns(*pair) for pair in zip(figures, baseline, strict=True)]
        return sum_by_question(np.array(rows, dtype=np.float64), questions)


def ratio_of_ratios(means: Float[ndarray, "... 4"]) -> Float[ndarray, "..."]:
    """Divide the ratio of the first two columns by the ratio of the last two."""
    return ratio_of_means(means[..., :2]) / ratio_of_means(means[..., 2:])


METRICS = {
    "tokens_per_s": Metric(columns=lambda row, _: (row.decoded_tokens, row.decode_s)),
    "speedup": Metric(
        columns=lambda row, base: (row.decoded_tokens, row.decode_s, base.decoded_tokens, base.decode_s),
        statistic=ratio_of_ratios,
    ),
    "speedup_e2e": Metric(
        columns=lambda row, base: (row.tokens, row.e2e_ms, base.tokens, base.e2e_ms), statistic=ratio_of_ratios
    ),
    "acceptance_length": Metric(columns=lambda row, _: (row.accepted + row.rounds, row.rounds), support=(1.0, np.inf)),
    "delivered_per_round": Metric(columns=lambda row, _: (row.decoded_tokens, row.rounds)),
    "acceptance_rate": Metric(columns=lambda row, _: (row.accepted, row.drafted), support=(0.0, 1.0)),
}


def estimate_metric(name: str, mode: ModeResult, baseline: ModeResult) -> Estimate | None:
    """Estimate a metric of METRICS with its interval; return None if it is undefined."""
    metric = METRICS[name]
    rows = metric.collect_rows(mode.figures, baseline.figures, mode.questions)
    return bootstrap_t(rows, metric.statistic, support=metric.support)


def estimate_gain(
    name: str, mode: ModeResult, other: ModeResult, baselines: tuple[ModeResult, ModeResult]
) -> Estimate | None:
    """Estimate the metric of `mode` minus that of `other`, paired by prompt.

    `baselines` are the autoregressive modes of the two. Return None for the acceptance rate of a tree minus that of a
    chain: siblings exclude each other, so a tree's rate is lower by construction.
    """
    if name == "acceptance_rate" and has_tree_rounds(mode) != has_tree_rounds(other):
        return None
    metric = METRICS[name]
    rows, other_rows = (
        metric.collect_rows(result.figures, baseline.figures, mode.questions)
        for result, baseline in zip((mode, other), baselines, strict=True)
    )
    statistic = subtract_statistics(metric.statistic, rows.shape[1])
    return bootstrap_t(np.hstack([rows, other_rows]), statistic)


def subtract_statistics(statistic: Statistic, columns: int) -> Statistic:
    """Return the statistic of the first `columns` columns minus that of the remaining ones."""
    return lambda means: statistic(means[..., :columns]) - statistic(means[..., columns:])


def sum_by_question(
    rows: Float[ndarray, "prompts columns"], questions: Sequence[str]
) -> Float[ndarray, "questions columns"]:
    """Return one row per question: the sum over its turns.

    >>> sum_by_question(np.array([[1.0, 2.0], [5.0, 0.0], [3.0, 4.0]]), ["a", "b", "a"])
    array([[4., 6.],
           [5., 0.]])
    """
    row_of = {question: row for row, question in enumerate(dict.fromkeys(questions))}
    sums = np.zeros((len(row_of), rows.shape[1]))
    np.add.at(sums, [row_of[question] for question in questions], rows)
    return sums


def has_tree_rounds(mode: ModeResult) -> bool:
    """Return whether a round proposed more nodes than the mode is deep."""
    return mode.nodes > mode.depth


def acceptance_by_position(mode: ModeResult) -> PositionAcceptance:
    """Return the shares of rounds that accept at least 1, 2, ... draft tokens."""
    accepted = np.array([n for result in mode.prompt_results for n in result.generation.accepted])
    reached = [int((accepted >= position).sum()) for position in range(mode.depth + 1)]
    return PositionAcceptance(
        marginal=[count / max(1, reached[0]) for count in reached[1:]],
        conditional=[after / before if before else None for before, after in pairwise(reached)],
    )


def take_percentiles(values: Sequence[float | None]) -> Percentiles | None:
    """Return percentiles over prompts; None if no prompt has a value."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(known, [50, 90, 99]))
    return Percentiles(p50=p50, p90=p90, p99=p99)


def is_looping(ids: list[int], *, width: int = 8, times: int = 3) -> bool:
    """Return whether a window of `width` tokens occurs `times` times: such text is easy to draft.

    >>> is_looping([1, 2] * 10), is_looping(list(range(20)))
    (True, False)
    """
    windows = Counter(tuple(ids[start : start + width]) for start in range(len(ids) - width + 1))
    return max(windows.values(), default=0) >= times
