"""95 % intervals over prompts for figures that are functions of sums, by the bootstrap-t.

Rounds of one prompt resemble each other, so prompts are resampled, never rounds. A figure is any
smooth function of the means over prompts of a few columns: (tokens, rounds) for a ratio of sums,
four columns for the difference of two ratios. Pairing needs no code of its own: a prompt is a row.

Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 11 (jackknife) and 12.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

RESAMPLES = 2000
BLOCKS = 10  # of resamples: those of a hundred prompts then fit the processor's cache
SEED = 0
# With fewer prompts a resample too often repeats one prompt and has no spread to studentise by.
FEWEST_PROMPTS = 8
# The share of resamples without spread above which the bootstrap distribution says nothing.
MOST_UNDEFINED = 0.05

Statistic = Callable[[ndarray], ndarray]


@dataclass(kw_only=True)
class Estimate:
    """A figure and its 95 % interval; None where one prompt, or no spread to be had, gives none."""

    mean: float
    ci95: list[float] | None


def ratio(means: Float[ndarray, "... columns"]) -> Float[ndarray, "..."]:
    """The first column over the second: a ratio of sums, or a mean where the second is ones."""
    return means[..., 0] / means[..., 1]


def bootstrap_t(
    rows: Float[ndarray, "prompts columns"],
    statistic: Statistic = ratio,
    *,
    support: tuple[float, float] = (-np.inf, np.inf),
) -> Estimate | None:
    """`statistic` of the column means with its interval, cut to the values the figure can take.

    None where the figure is undefined, as the acceptance rate of a mode that drafts nothing.

    >>> bootstrap_t(np.array([[6.0, 2.0], [9.0, 3.0]]))  # every prompt has the ratio 3
    Estimate(mean=3.0, ci95=[3.0, 3.0])
    """
    mean, interval = with_interval(rows, statistic, level=0.95)
    if mean is None:
        return None
    return Estimate(mean=mean, ci95=interval and [float(x) for x in np.clip(interval, *support)])


def with_interval(
    rows: Float[ndarray, "prompts columns"], statistic: Statistic, *, level: float
) -> tuple[float | None, list[float] | None]:
    """The statistic of the column means, and what it lies in with a probability of `level`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = float(statistic(rows.mean(0, keepdims=True))[0])
        if not np.isfinite(mean):
            return None, None
        error = jackknife_error(rows, statistic) if len(rows) > 1 else np.nan
        if not np.isfinite(error):
            return mean, None
        if error <= 1e-12 * max(1.0, abs(mean)):
            return mean, [mean, mean]
        tail = (1 - level) / 2
        t_low, t_high = _studentised(rows, statistic, mean=mean, error=error, tail=tail)
    return mean, [mean - t_high * error, mean - t_low * error]


def jackknife_error(rows: Float[ndarray, "prompts columns"], statistic: Statistic) -> float:
    """Standard error of the statistic, from leaving out each prompt once."""
    once = np.ones((1, len(rows)))
    return float(_jackknife_errors(rows, once, rows.sum(0, keepdims=True), statistic)[0])


def _jackknife_errors(
    rows: Float[ndarray, "prompts columns"],
    times: Float[ndarray, "resamples prompts"],
    sums: Float[ndarray, "resamples columns"],
    statistic: Statistic,
) -> Float[ndarray, " resamples"]:
    """The same of resamples that hold a prompt so many times: a prompt is left out for each."""
    num_prompts = len(rows)
    # columns first: `statistic` then reads memory in order, several times as fast
    whole, one = (np.ascontiguousarray(part.T) / (num_prompts - 1) for part in (sums, rows))
    less_one = whole[:, :, None] - one[:, None, :]
    left_out = np.where(times > 0, statistic(np.moveaxis(less_one, 0, -1)), 0.0)
    centre = np.einsum("rp,rp->r", times, left_out)[:, None] / num_prompts
    left_out -= centre
    squares = np.einsum("rp,rp,rp->r", times, left_out, left_out)
    return np.sqrt((num_prompts - 1) / num_prompts * squares)


def _studentised(
    rows: ndarray, statistic: Statistic, *, mean: float, error: float, tail: float
) -> tuple[float, float]:
    """The points of (estimate - truth) / standard error that leave `tail` on either side."""
    student = float(stats.t.ppf(1 - tail, len(rows) - 1))
    if len(rows) < FEWEST_PROMPTS:
        return -student, student
    times = _resamples(len(rows))
    sums = times @ rows
    parts = zip(np.split(times, BLOCKS), np.split(sums, BLOCKS), strict=True)
    errors = np.hstack([_jackknife_errors(rows, *part, statistic) for part in parts])
    t = (statistic(sums / len(rows)) - mean) / errors
    defined = np.isfinite(t) & (errors > 1e-9 * error)
    if defined.mean() < 1 - MOST_UNDEFINED:
        return -student, student
    low, high = np.quantile(t[defined], [tail, 1 - tail])
    return float(low), float(high)


@lru_cache(maxsize=16)
def _resamples(num_prompts: int) -> Float[ndarray, "resamples prompts"]:
    """How often each resample holds each prompt: the same for every figure and every run."""
    drawn = np.random.default_rng(SEED).integers(num_prompts, size=(RESAMPLES, num_prompts))
    drawn += num_prompts * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=RESAMPLES * num_prompts)
    return counts.reshape(RESAMPLES, num_prompts).astype(np.float64)
