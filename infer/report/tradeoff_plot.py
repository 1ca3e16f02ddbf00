"""The plot to choose a draft by: speed-up against acceptance length.

A draft that cost nothing would lie on the line speed-up = tau; the distance below it is the cost.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy.optimize import isotonic_regression

from infer.report.palette import INK, PAPER, assign_draft_colors
from infer.report.views import ModeDict, ReportDict

LABEL_SPACING = 0.062  # between two labels, as a share of the plot's height
MODE_MARKERS: dict[str, Any] = {
    "tree": {"marker": "o", "ms": 8},
    "chain": {"marker": "o", "ms": 7, "mfc": PAPER, "mew": 1.6},
    "ngram": {"marker": "s", "ms": 6.5, "mfc": PAPER, "mew": 1.6},
    "autoregressive": {"marker": "D", "ms": 6},
}


@dataclass(kw_only=True)
class PlotPoint:
    """A mode in the plot; a missing interval is the mean twice."""

    tau: float
    speedup: float
    tau_interval: list[float]
    speedup_interval: list[float]


def plot_speedup_against_length(axes: Axes, report: ReportDict) -> None:
    """Plot each draft's chain and tree, joined; and n-gram lookup and autoregressive decoding."""
    colors = assign_draft_colors(report)
    for color, draft in zip(colors, report["drafts"], strict=True):
        ends = [
            point for name in ("chain", "tree") if (point := _build_point(draft["modes"][name]))
        ]
        axes.plot([p.tau for p in ends], [p.speedup for p in ends], color=color, lw=1.6)
    points = [
        point
        for color, draft in zip(colors, report["drafts"], strict=True)
        for name in ("chain", "tree")
        if (point := _draw_point(axes, draft["modes"][name], name, color))
    ]
    points += [
        point
        for name in ("autoregressive", "ngram")
        if (point := _draw_point(axes, report[name], name, INK))
    ]
    _set_limits(axes, points)
    _label_points(axes, report, colors)
    axes.set(xlabel="acceptance length (tau), tokens a round", ylabel="speed-up")


def build_marker_legend() -> list[Line2D]:
    """Build the legend of filled and hollow markers."""
    return [
        Line2D([], [], color=INK, ls="", label=label, **MODE_MARKERS[name])
        for name, label in (("tree", "tree"), ("chain", "chain of the same draft"))
    ]


def _build_point(mode: ModeDict | None) -> PlotPoint | None:
    if mode is None or mode["acceptance_length"] is None or mode["speedup"] is None:
        return None
    tau, speedup = mode["acceptance_length"], mode["speedup"]
    return PlotPoint(
        tau=tau["mean"],
        speedup=speedup["mean"],
        tau_interval=tau["ci95"] or [tau["mean"]] * 2,
        speedup_interval=speedup["ci95"] or [speedup["mean"]] * 2,
    )


def _draw_point(axes: Axes, mode: ModeDict | None, name: str, color: str) -> PlotPoint | None:
    """Draw a mode with the intervals of both figures; return None if it lacks one."""
    point = _build_point(mode)
    if point is not None:
        axes.plot(point.tau_interval, [point.speedup] * 2, color=color, lw=1.4, alpha=0.55)
        axes.plot([point.tau] * 2, point.speedup_interval, color=color, lw=1.4, alpha=0.55)
        axes.plot(point.tau, point.speedup, color=color, ls="", zorder=3, **MODE_MARKERS[name])
    return point


def _set_limits(axes: Axes, points: list[PlotPoint]) -> None:
    """Set limits around the intervals, and draw the two lines of reference."""
    right = max([1.2, *(tau for point in points for tau in point.tau_interval)])
    speedups = [1.0, *(value for point in points for value in point.speedup_interval)]
    low, high = min(speedups), max(speedups)
    margin = 0.08 * max(high - low, 0.1)
    top, bottom = high + margin, low - 2 * margin
    axes.set(xlim=(1 - 0.06 * (right - 1), right + 0.03 * (right - 1)), ylim=(bottom, top))
    axes.axhline(1, color=INK, lw=0.8, ls=":")
    axes.axline((1, 1), slope=1, color=INK, lw=0.8, ls="--")
    start = 1 + 0.05 * (right - 1)
    axes.text(
        start, start, "speed-up = tau (no cost)", color=INK, fontsize=9, rotation=45, va="bottom",
        rotation_mode="anchor", transform_rotates_text=True, clip_on=True,
    )  # fmt: skip


def _label_points(axes: Axes, report: ReportDict, colors: list[str]) -> None:
    """Label the points on the right, in order of height; a draft's label is tied to its tree."""
    (_, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    ties = [(1.0, right, "autoregressive", INK)]  # at the right end of the dotted line
    if point := _build_point(report["ngram"]):
        ties.append((point.speedup, point.tau, "n-gram lookup", INK))
    for color, draft in zip(colors, report["drafts"], strict=True):
        if point := _build_point(draft["modes"]["tree"]):
            name = draft["name"] + (" (own target)" if draft["target"] else "")
            ties.append((point.speedup, point.tau, name, color))
    ties.sort()
    heights = spread_labels(
        [tie[0] for tie in ties], min_gap=LABEL_SPACING * (top - bottom), limits=(bottom, top)
    )
    for (speedup, tau, name, color), height in zip(ties, heights, strict=True):
        axes.annotate(
            name, (tau, speedup), xytext=(1.02, height), textcoords=axes.get_yaxis_transform(),
            va="center", fontsize=9, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": color, "lw": 0.7, "alpha": 0.7, "relpos": (0, 0.5),
                "shrinkA": 2, "shrinkB": 0 if tau == right else 5,
            },
        )  # fmt: skip


def spread_labels(
    heights: list[float], *, min_gap: float, limits: tuple[float, float]
) -> list[float]:
    """Move rising heights as little as possible to be `min_gap` apart and within the limits.

    >>> spread_labels([1.0, 1.0, 5.0], min_gap=0.5, limits=(0.0, 4.0))
    [0.75, 1.25, 4.0]
    """
    steps = min_gap * np.arange(len(heights))
    bottom, top = limits
    fitted = isotonic_regression(np.array(heights) - steps).x
    return (fitted.clip(bottom, top - steps[-1]) + steps).tolist()
