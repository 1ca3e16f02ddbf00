"""The sentence on a draft's training: whether tau still rises with the tokens that it learns from.

The line, its interval and the prediction are those of `infer/results/curve.py`.
"""

from infer.report.number_format import format_estimate
from infer.results.curve import MIN_FITTED_POINTS, Trend, fit_rise, predict_tau, take_last_half
from infer.results.intervals import Estimate
from infer.results.schema import CurvePoint, Report


def describe_training(report: Report) -> list[str]:
    """Return a sentence for each draft whose training left a curve."""
    return [f"{draft.name}: {describe_curve(draft.training)}" for draft in report.drafts if draft.training]


def describe_curve(points: list[CurvePoint]) -> str:
    """Say whether tau still rises, and while it does, what twice the tokens would give.

    >>> describe_curve([CurvePoint(tokens=100 * n, tau=2.0) for n in range(3)])
    'too few evaluations to tell whether tau still rises: 3, and 7 are needed; lower interval.eval.'
    """
    line = fit_rise(points)
    if line is None:
        return (
            f"too few evaluations to tell whether tau still rises: {len(points)}, and "
            f"{2 * MIN_FITTED_POINTS - 1} are needed; lower interval.eval."
        )
    trend = Trend.from_slope(line.slope)
    return (
        f"tau {trend.value}: {_format_slope(line.slope)} a million tokens over the last "
        f"{len(take_last_half(points))} of {len(points)} evaluations, up to "
        f"{points[-1].tokens:,} tokens"
        f"{_describe_prediction(points) if trend is Trend.rising else ''}."
    )


def _describe_prediction(points: list[CurvePoint]) -> str:
    predicted = predict_tau(points, 2 * points[-1].tokens)
    return f"; at twice the tokens about {format_estimate(predicted)}"


def _format_slope(slope: Estimate) -> str:
    """Format a slope, which is tiny for a long run, with two significant digits.

    >>> _format_slope(Estimate(mean=0.00021, ci95=[-0.0001, 0.00052]))
    '+0.00021 [-0.00010, +0.00052]'
    """
    mean, low, high = (f"{x:+#.2g}".rstrip(".") for x in (slope.mean, *(slope.ci95 or ())))
    return f"{mean} [{low}, {high}]"
