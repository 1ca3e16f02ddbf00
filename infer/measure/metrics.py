"""Compute the metrics of a mode with their intervals, and the gains of one mode over another.

Except for the mean over prompts, every metric is a ratio of sums over prompts: a long answer weighs
more than a short one, as it does on a server. Intervals are over questions, because the turns of
one conversation resemble each other. `docs/report.md` defines each metric.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from infer.engine.requests import Generation
from infer.measure.intervals import Estimate, Statistic, bootstrap_t, ratio_of_means
from infer.measure.records import PromptResult
from infer.measure.report_schema import Percentiles, PositionAcceptance


@dataclass(kw_only=True)
class Metric:
    """The definition of a metric.

    `columns` computes a row from a prompt's answer and its autoregressive answer, `statistic` the
    metric from the means of the columns; `support` is the range of its values.
    """

    columns: Callable[[Generation, Generation], tuple[float, ...]]
    statistic: Statistic
    support: tuple[float, float] = (0.0, np.inf)


def ratio_of_ratios(means: Float[ndarray, "... 4"]) -> Float[ndarray, "..."]:
    """Divide the ratio of the first two columns by the ratio of the last two."""
    return ratio_of_means(means[..., :2]) / ratio_of_means(means[..., 2:])


def _prompt_acceptance(answer: Generation) -> tuple[float, float]:
    """Return the acceptance length of one prompt and its weight, which is 0 without rounds."""
    return (sum(answer.accepted) / answer.rounds + 1, 1.0) if answer.rounds else (0.0, 0.0)


EVAL_METRICS = {
    "tokens_per_s": Metric(
        columns=lambda r, _: (r.decoded_tokens, r.decode_s), statistic=ratio_of_means
    ),
    "speedup": Metric(
        columns=lambda r, base: (
            r.decoded_tokens,
            r.decode_s,
            base.decoded_tokens,
            base.decode_s,
        ),
        statistic=ratio_of_ratios,
    ),
    "speedup_e2e": Metric(
        columns=lambda r, base: (len(r.ids), r.e2e_s, len(base.ids), base.e2e_s),
        statistic=ratio_of_ratios,
    ),
    "acceptance_length": Metric(
        columns=lambda r, _: (sum(r.accepted) + r.rounds, r.rounds),
        statistic=ratio_of_means,
        support=(1.0, np.inf),
    ),
    "delivered_per_round": Metric(
        columns=lambda r, _: (r.decoded_tokens, r.rounds), statistic=ratio_of_means
    ),
    "acceptance_length_per_prompt": Metric(
        columns=lambda r, _: _prompt_acceptance(r), statistic=ratio_of_means, support=(1.0, np.inf)
    ),
    "acceptance_rate": Metric(
        columns=lambda r, _: (sum(r.accepted), sum(r.drafted)),
        statistic=ratio_of_means,
        support=(0.0, 1.0),
    ),
}


def estimate_metric(
    name: str, results: list[PromptResult], autoregressive: list[PromptResult]
) -> Estimate | None:
    """Estimate a metric of EVAL_METRICS with its interval.

    `autoregressive` must hold the same prompts. Return None if the metric is undefined.
    """
    metric = EVAL_METRICS[name]
    rows = sum_by_question(
        _collect_rows(metric, results, autoregressive), [r.prompt.question for r in results]
    )
    return bootstrap_t(rows, metric.statistic, support=metric.support)


def estimate_gain(
    name: str,
    results: list[PromptResult],
    other: list[PromptResult],
    autoregressive: list[PromptResult],
    others_autoregressive: list[PromptResult] | None = None,
) -> Estimate | None:
    """Estimate the metric of `results` minus that of `other`, paired by prompt.

    `others_autoregressive` is the baseline of `other` if that has a different target. Return None
    for the acceptance rate of a tree minus that of a chain: siblings exclude each other, so a
    tree's rate is lower by construction.
    """
    if name == "acceptance_rate" and has_tree_rounds(results) != has_tree_rounds(other):
        return None
    metric = EVAL_METRICS[name]
    columns = _collect_rows(metric, results, autoregressive)
    other_columns = _collect_rows(metric, other, others_autoregressive or autoregressive)
    other_row = {result.prompt.id: row for row, result in enumerate(other)}
    paired = other_columns[[other_row[result.prompt.id] for result in results]]
    rows = sum_by_question(np.hstack([columns, paired]), [r.prompt.question for r in results])
    return bootstrap_t(rows, subtract_statistics(metric.statistic, columns.shape[1]))


def subtract_statistics(statistic: Statistic, columns: int) -> Statistic:
    """Return the statistic of the first `columns` columns minus that of the remaining ones."""
    return lambda means: statistic(means[..., :columns]) - statistic(means[..., columns:])


def sum_by_question(
    rows: Float[ndarray, "prompts columns"], questions: list[str]
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


def memory_bound_speedup(
    acceptance_length: Estimate, *, draft_passes: int, bytes_ratio: float
) -> Estimate:
    """Return the memory-bound speed-up tau / (1 + c L), if a pass costs the bytes that it reads.

    c is `bytes_ratio`, the draft's weights over the target's; L is `draft_passes`.

    >>> memory_bound_speedup(Estimate(mean=3.0, ci95=[2.4, 3.6]), draft_passes=4, bytes_ratio=0.05)
    Estimate(mean=2.5, ci95=[2.0, 3.0])
    """
    cost = 1 + bytes_ratio * draft_passes
    return Estimate(
        mean=acceptance_length.mean / cost,
        ci95=acceptance_length.ci95 and [bound / cost for bound in acceptance_length.ci95],
    )


def _collect_rows(
    metric: Metric, results: list[PromptResult], autoregressive: list[PromptResult]
) -> Float[ndarray, "prompts columns"]:
    baselines = {result.prompt.id: result.generation for result in autoregressive}
    rows = [metric.columns(r.generation, baselines[r.prompt.id]) for r in results]
    return np.array(rows, dtype=np.float64)


def has_tree_rounds(results: list[PromptResult]) -> bool:
    """Return whether a round proposed more nodes than the mode is deep."""
    return any(max(result.generation.drafted, default=0) > result.depth for result in results)


def acceptance_by_position(results: list[PromptResult]) -> PositionAcceptance:
    """Return the shares of rounds that accept at least 1, 2, ... draft tokens."""
    accepted = np.array([count for result in results for count in result.generation.accepted])
    depth = max((result.depth for result in results), default=0)
    reached = [int((accepted >= position).sum()) for position in range(depth + 1)]
    return PositionAcceptance(
        marginal=[count / max(1, reached[0]) for count in reached[1:]],
        conditional=[after / before if before else None for before, after in pairwise(reached)],
    )


def inter_token_latency(answer: Generation) -> float | None:
    """Return the inter-token latency in seconds, (E2E - TTFT) / (tokens - 1).

    It is a mean, because all tokens of a round arrive at once. None for an answer of one token.
    """
    return answer.decode_s / answer.decoded_tokens if answer.decoded_tokens else None


def percentiles_in_ms(seconds: list[float | None]) -> Percentiles | None:
    """Return percentiles over prompts, in milliseconds; None if no prompt has a value."""
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
