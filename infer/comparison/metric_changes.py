"""The metrics that differ between two sides, and which of them moved beyond noise.

A side is one or more reports of one measurement; both sides have the same prompts. The noise between prompts is
estimated by resampling their pairs, that between runs from the figures of whole runs (Welch, Biometrika 34, 1947). Only
metrics of time have the latter: the same tokens are accepted in every run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from jaxtyping import Float
from numpy import ndarray

from infer.comparison.diff import index_modes
from infer.results.intervals import Statistic, estimate_interval
from infer.results.metrics import METRICS, subtract_statistics
from infer.results.records import AUTOREGRESSIVE
from infer.results.schema import Report

FALSE_ALARM_RATE = 0.05  # share of comparisons in which nothing changed
COMPARED_METRICS = {  # by the name that is shown
    "tau": "acceptance_length",
    "acceptance rate": "acceptance_rate",
    "speed-up": "speedup",
    "tokens/s": "tokens_per_s",
}
TIMED_METRICS = ("speed-up", "tokens/s")


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A figure of a mode on two sides, and the interval of the difference.

    `interval` is None where the noise is not known. A fall of a `gated` metric is a regression.
    """

    mode: str
    metric: str
    before: float
    after: float
    interval: list[float] | None
    gated: bool

    @property
    def is_beyond_noise(self) -> bool:
        """Return whether the interval of the difference excludes 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def is_regression(self) -> bool:
        """Return whether a metric that must not fall has fallen beyond noise."""
        return self.gated and self.is_beyond_noise and self.after < self.before


def has_several_runs(before: Sequence[Report], after: Sequence[Report]) -> bool:
    """Return whether the noise between runs is known: each side has more than one."""
    return min(len(before), len(after)) > 1


def compare_metrics(before: Sequence[Report], after: Sequence[Report]) -> Iterator[MetricChange]:
    """Yield every metric of every mode that both sides have; those of time have an interval if several runs do."""
    views = index_modes([*before, *after])
    shared = [name for name in views[0] if all(name in each for each in views)]
    knows_speed = has_several_runs(before, after)
    gated = ("tau", "speed-up") if knows_speed else ("tau",)
    num_drafting = sum(views[0][name].mode.figures.depth > 0 for name in shared)
    # Bonferroni, over the comparisons that can be a regression.
    level = 1 - FALSE_ALARM_RATE / max(1, len(gated) * num_drafting)
    for name in shared:
        for metric, schema_name in COMPARED_METRICS.items():
            runs = [
                _collect_rows(report, each[name].key, schema_name)
                for report, each in zip([*before, *after], views, strict=True)
            ]
            old_runs, new_runs = runs[: len(before)], runs[len(before) :]
            statistic = METRICS[schema_name].statistic
            old, new = (_measure(np.concatenate(runs), statistic) for runs in (old_runs, new_runs))
            if math.isfinite(old) and math.isfinite(new):
                knows_noise, is_gated = knows_speed or metric not in TIMED_METRICS, metric in gated
                interval = estimate_change(old_runs, new_runs, statistic, level) if knows_noise else None
                yield MetricChange(mode=name, metric=metric, before=old, after=new, interval=interval, gated=is_gated)


def estimate_change(
    old_runs: list[ndarray], new_runs: list[ndarray], statistic: Statistic, level: float
) -> list[float] | None:
    """Return the interval of the new figure minus the old one, with both kinds of noise."""
    old_rows, new_rows = (np.mean(runs, 0) for runs in (old_runs, new_runs))
    subtract = subtract_statistics(statistic, old_rows.shape[1])
    difference, interval = estimate_interval(np.hstack([new_rows, old_rows]), subtract, level=level)
    if difference is None or interval is None:
        return None
    old, new = ([_measure(rows, statistic) for rows in runs] for runs in (old_runs, new_runs))
    (low, high), noise = interval, _estimate_run_noise(old, new, level)
    return [difference - math.hypot(difference - low, noise), difference + math.hypot(high - difference, noise)]


def _measure(rows: Float[ndarray, "questions columns"], statistic: Statistic) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(statistic(rows.mean(0)))


def _collect_rows(report: Report, key: str, metric: str) -> Float[ndarray, "questions columns"]:
    # A draft that adapts its target has an autoregressive mode to be compared with.
    own_baseline, rows = f"{key.rpartition('/')[0]}/{AUTOREGRESSIVE}", report.per_prompt
    return METRICS[metric].collect_rows(
        [row.modes[key] for row in rows],
        [row.modes.get(own_baseline, row.modes[AUTOREGRESSIVE]) for row in rows],
        [row.question for row in rows],
    )


def _estimate_run_noise(old: list[float], new: list[float], level: float) -> float:
    """Return half the width of Welch's interval of the difference of two means of runs.

    It is 0 if a side has one run, or if all runs of each side are equal.

    >>> round(_estimate_run_noise([1.5, 1.6, 1.7], [1.5, 1.6, 1.7], 0.95), 3)  # t of 4 degrees
    0.227
    """
    if min(len(old), len(new)) < 2 or len(set(old)) == len(set(new)) == 1:
        return 0.0
    interval = scipy.stats.ttest_ind(new, old, equal_var=False).confidence_interval(level)
    return float(interval.high - interval.low) / 2
