"""95 % intervals over prompts for metrics that are functions of sums, by the bootstrap-t.

Rounds of one prompt resemble each other, so prompts are resampled, never rounds. A metric is any smooth function of the
means over prompts of a few columns: two for a ratio of sums, four for the paired difference of two ratios.

Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 11 (jackknife) and 12.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import scipy
from jaxtyping import Float
from numpy import ndarray
from pydantic import Field

NUM_RESAMPLES = 2000
RESAMPLE_BLOCKS = 10  # so that a block of resamples of 100 prompts fits the CPU cache
BOOTSTRAP_SEED = 0
# With fewer prompts, too many resamples repeat one prompt and have no spread to studentize by.
MIN_PROMPTS = 8
# Above this share of resamples without spread the bootstrap distribution is not used.
MAX_UNDEFINED_SHARE = 0.05

Statistic = Callable[[ndarray], ndarray]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric's value and its 95 % interval.

    `ci95` is None if no standard error can be computed, as with a single prompt.
    """

    mean: float
    ci95: Annotated[list[float], Field(min_length=2, max_length=2)] | None


def ratio_of_means(means: Float[ndarray, "... columns"]) -> Float[ndarray, "..."]:
    """Divide the first column by the second: a ratio of sums, or a mean if the second is ones."""
    return means[..., 0] / means[..., 1]


def bootstrap_t(
    rows: Float[ndarray, "prompts columns"],
    statistic: Statistic = ratio_of_means,
    *,
    support: tuple[float, float] = (-np.inf, np.inf),
) -> Estimate | None:
    """Estimate `statistic` of the column means, with its interval clipped to `support`.

    Return None if it is undefined, like the acceptance rate of a mode that drafts nothing.

    >>> bootstrap_t(np.array([[6.0, 2.0], [9.0, 3.0]]))  # every prompt has the ratio 3
    Estimate(mean=3.0, ci95=[3.0, 3.0])
    """
    mean, interval = estimate_interval(rows, statistic, level=0.95)
    if mean is None:
        return None
    return Estimate(mean=mean, ci95=interval and [float(x) for x in np.clip(interval, *support)])


def estimate_interval(
    rows: Float[ndarray, "prompts columns"], statistic: Statistic, *, level: float
) -> tuple[float | None, list[float] | None]:
    """Return the statistic of the column means and its interval at confidence `level`.

    Either is None if it is undefined. Without spread both bounds are the statistic.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = float(statistic(rows.mean(0, keepdims=True))[0])
        if not np.isfinite(mean):
            return None, None
        if len(rows) == 1:
            return mean, None
        once = np.ones((1, len(rows)))
        (error,) = _jackknife_errors(rows, once, rows.sum(0, keepdims=True), statistic).tolist()
        if not np.isfinite(error):
            return mean, None
        if error <= 1e-12 * max(1.0, abs(mean)):  # rounding only
            return mean, [mean, mean]
        tail = (1 - level) / 2
        t_low, t_high = _studentized_quantiles(rows, statistic, mean=mean, error=error, tail=tail)
    return mean, [mean - t_high * error, mean - t_low * error]


def _jackknife_errors(
    rows: Float[ndarray, "prompts columns"],
    times: Float[ndarray, "resamples prompts"],
    sums: Float[ndarray, "resamples columns"],
    statistic: Statistic,
) -> Float[ndarray, " resamples"]:
    """Return the jackknife standard error of each resample.

    `times` counts how often a resample holds each prompt, `sums` are its column sums. Each
    occurrence of a prompt is left out once.
    """
    num_prompts = len(rows)
    # With the columns first, `statistic` reads memory in order, which is several times as fast.
    totals, terms = (np.ascontiguousarray(part.T) / (num_prompts - 1) for part in (sums, rows))
    means_without = totals[:, :, None] - terms[:, None, :]
    values = np.where(times > 0, statistic(np.moveaxis(means_without, 0, -1)), 0.0)
    center = np.einsum("rp,rp->r", times, values)[:, None] / num_prompts
    values -= center
    squares = np.einsum("rp,rp,rp->r", times, values, values)
    return np.sqrt((num_prompts - 1) / num_prompts * squares)


def _studentized_quantiles(
    rows: ndarray, statistic: Statistic, *, mean: float, error: float, tail: float
) -> tuple[float, float]:
    """Return the quantiles `tail` and 1 - `tail` of (estimate - truth) / standard error.

    They are those of Student's t with too few prompts, or if too many resamples have no spread.
    """
    student = float(scipy.stats.t.ppf(1 - tail, len(rows) - 1))
    if len(rows) < MIN_PROMPTS:
        return -student, student
    times = _draw_resamples(len(rows))
    sums = times @ rows
    blocks = zip(np.split(times, RESAMPLE_BLOCKS), np.split(sums, RESAMPLE_BLOCKS), strict=True)
    errors = np.hstack([_jackknife_errors(rows, *block, statistic) for block in blocks])
    t = (statistic(sums / len(rows)) - mean) / errors
    defined = np.isfinite(t) & (errors > 1e-9 * error)  # a smaller error is rounding only
    if defined.mean() < 1 - MAX_UNDEFINED_SHARE:
        return -student, student
    low, high = np.quantile(t[defined], [tail, 1 - tail])
    return float(low), float(high)


@lru_cache(maxsize=16)
def _draw_resamples(num_prompts: int) -> Float[ndarray, "resamples prompts"]:
    """Return how often each resample holds each prompt; equal for every metric and every run."""
    drawn = np.random.default_rng(BOOTSTRAP_SEED).integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
    drawn += num_prompts * np.arange(NUM_RESAMPLES)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=NUM_RESAMPLES * num_prompts)
    return counts.reshape(NUM_RESAMPLES, num_prompts).astype(np.float64)
