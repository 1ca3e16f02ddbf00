"""The curve of tau over the tokens that a draft was trained on, and whether it still rises.

A least squares line over the last half of the points tells whether more training still pays; its interval holds the
points' noise about the line, not that between prompts, which all points share.
"""

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from jaxtyping import Float
from numpy import ndarray

from infer.results.intervals import Estimate
from infer.results.schema import CurvePoint

METRICS_FILE = "metrics.jsonl"  # file name of a training run's metrics, beside its checkpoint
MIN_FITTED_POINTS = 4  # fewer leave a line too little noise to judge it by


class Trend(Enum):
    """The direction of the last half of a curve, judged by the interval of its slope."""

    rising = "still rises"
    flat = "is flat within its noise"
    falling = "falls"

    @classmethod
    def from_slope(cls, slope: Estimate) -> "Trend":
        """Return the trend of a slope whose interval excludes 0, or `flat`.

        >>> Trend.from_slope(Estimate(mean=0.2, ci95=[0.1, 0.3]))
        <Trend.rising: 'still rises'>
        """
        low, high = slope.ci95 or (-np.inf, np.inf)
        return cls.rising if low > 0 else cls.falling if high < 0 else cls.flat


class Line:
    """An ordinary least squares line through three or more points.

    >>> Line(np.arange(4.0), np.array([1.0, 3.0, 5.0, 7.0])).slope
    Estimate(mean=2.0, ci95=[2.0, 2.0])
    """

    def __init__(self, x: Float[ndarray, " points"], y: Float[ndarray, " points"]):
        self.x = x
        self.fit: Any = scipy.stats.linregress(x, y)  # scipy does not declare its fields
        self.t = float(scipy.stats.t.ppf(0.975, len(x) - 2))

    @property
    def slope(self) -> Estimate:
        return self._estimate(self.fit.slope, self.fit.stderr)

    def value(self, x: float) -> float:
        """Return the height of the line."""
        return float(self.fit.intercept + self.fit.slope * x)

    def predict(self, x: float) -> Estimate:
        """Return the height at `x`, with the interval of one more point there."""
        center, num_points = self.x.mean(), len(self.x)
        squares = ((self.x - center) ** 2).sum()
        # The slope's error is the noise of a point over the root of `squares`.
        reach = np.sqrt(squares * (1 + 1 / num_points) + (x - center) ** 2)
        return self._estimate(self.value(x), self.fit.stderr * reach)

    def _estimate(self, mean: float, error: float) -> Estimate:
        mean, reach = float(mean), self.t * float(error)
        return Estimate(mean=mean, ci95=[mean - reach, mean + reach])


def read_curve(directory: Path) -> list[CurvePoint]:
    """Return the curve of the run that wrote a checkpoint, or [] if its metrics are not there."""
    file = directory.resolve().parent / METRICS_FILE
    if not file.exists():
        return []
    whole_lines = file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    return [
        CurvePoint(tokens=int(metrics["train/tokens"]), tau=metrics["eval/acceptance_length"])
        for metrics in map(json.loads, whole_lines)
        if {"train/tokens", "eval/acceptance_length"} <= metrics.keys()
    ]


def take_last_half(points: list[CurvePoint]) -> list[CurvePoint]:
    """Return the points that judge the curve: the last half, the middle one included."""
    return points[len(points) // 2 :]


def fit_rise(points: list[CurvePoint]) -> Line | None:
    """Return the line of tau over millions of tokens, or None if the curve is too short."""
    return _fit_last_half(points, lambda tokens: tokens / 1e6)


def predict_tau(points: list[CurvePoint], tokens: int) -> Estimate | None:
    """Predict tau after `tokens`, as a + b log(tokens) over the last half; None if too short.

    Every doubling adds as much as the one before. The interval is that of one more evaluation; it
    does not know that a learning rate which falls to the run's end lifts the end.

    >>> curve = [CurvePoint(tokens=2**n, tau=1.0 + n / 4) for n in range(1, 9)]
    >>> round(predict_tau(curve, 2**12).mean, 6)
    4.0
    """
    line = _fit_last_half(points, np.log)
    if line is None:
        return None
    predicted = line.predict(float(np.log(tokens)))
    low, high = predicted.ci95 or (predicted.mean, predicted.mean)
    return Estimate(mean=predicted.mean, ci95=[max(1.0, low), high])  # a round emits a token


def _fit_last_half(points: list[CurvePoint], scale: Callable[[ndarray], ndarray]) -> Line | None:
    """Return the line of tau over the scaled tokens, or None if the curve is too short."""
    last = take_last_half(points)
    tokens, taus = (np.array([getattr(point, name) for point in last], np.float64) for name in ("tokens", "tau"))
    return Line(scale(tokens), taus) if len(last) >= MIN_FITTED_POINTS else None
