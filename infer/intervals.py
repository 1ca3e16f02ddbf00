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
from jaxtyping import Float, Int
from numpy import ndarray
from scipy import stats

RESAMPLES = 2000
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
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = float(statistic(rows.mean(0, keepdims=True))[0])
        if not np.isfinite(mean):
            return None
        error = float(jackknife_error(rows[None], statistic)[0]) if len(rows) > 1 else np.nan
        if not np.isfinite(error):
            return Estimate(mean=mean, ci95=None)
        if error <= 1e-12 * max(1.0, abs(mean)):
            return Estimate(mean=mean, ci95=[mean, mean])
        t_low, t_high = _studentised(rows, statistic, mean=mean, error=error)
    low, high = np.clip([mean - t_high * error, mean - t_low * error], *support)
    return Estimate(mean=mean, ci95=[float(low), float(high)])


def jackknife_error(
    rows: Float[ndarray, "... prompts columns"], statistic: Statistic
) -> Float[ndarray, "..."]:
    """Standard error of the statistic, from leaving out each prompt once."""
    num_prompts = rows.shape[-2]
    left_out = statistic((rows.sum(-2, keepdims=True) - rows) / (num_prompts - 1))
    return np.sqrt((num_prompts - 1) * left_out.var(-1))


def _studentised(
    rows: ndarray, statistic: Statistic, *, mean: float, error: float
) -> tuple[float, float]:
    """The 2.5 % and 97.5 % points of (estimate - truth) / standard error."""
    student = float(stats.t.ppf(0.975, len(rows) - 1))
    if len(rows) < FEWEST_PROMPTS:
        return -student, student
    resampled = rows[_resamples(len(rows))]
    errors = jackknife_error(resampled, statistic)
    t = (statistic(resampled.mean(-2)) - mean) / errors
    defined = np.isfinite(t) & (errors > 1e-9 * error)
    if defined.mean() < 1 - MOST_UNDEFINED:
        return -student, student
    low, high = np.quantile(t[defined], [0.025, 0.975])
    return float(low), float(high)


@lru_cache(maxsize=16)
def _resamples(num_prompts: int) -> Int[ndarray, "resamples prompts"]:
    """Which prompts each resample holds: the same for every figure and every run."""
    return np.random.default_rng(SEED).integers(num_prompts, size=(RESAMPLES, num_prompts))
