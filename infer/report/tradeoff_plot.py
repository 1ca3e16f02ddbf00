"""The picture to choose a draft by: its speed-up against its acceptance length.

A draft that cost nothing would lie on the line speed-up = tau; how far below it lies is its cost.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy.optimize import isotonic_regression

from infer.report.palette import INK, PAPER, of_drafts
from infer.report.views import Mode, Report

LINE_HEIGHT = 0.062  # of the picture's height, between two names
SHAPES: dict[str, Any] = {  # how a mode is drawn
    "tree": {"marker": "o", "ms": 8},
    "chain": {"marker": "o", "ms": 7, "mfc": PAPER, "mew": 1.6},
    "ngram": {"marker": "s", "ms": 6.5, "mfc": PAPER, "mew": 1.6},
    "autoregressive": {"marker": "D", "ms": 6},
}


@dataclass(kw_only=True)
class Point:
    """A mode in the picture; the intervals are its mean twice where there is none."""

    tau: float
    speedup: float
    taus: list[float]
    speedups: list[float]


def speedup_against_length(axes: Axes, report: Report) -> None:
    """Each draft's tree and chain, joined; lookup and autoregressive decoding beside them."""
    colours = of_drafts(report)
    for colour, draft in zip(colours, report["drafts"], strict=True):
        ends = [point for name in ("chain", "tree") if (point := _point(draft["modes"][name]))]
        axes.plot([p.tau for p in ends], [p.speedup for p in ends], color=colour, lw=1.6)
    drawn = [
        point
        for colour, draft in zip(colours, report["drafts"], strict=True)
        for name in ("chain", "tree")
        if (point := _draw(axes, draft["modes"][name], name, colour))
    ]
    drawn += [
        point
        for name in ("autoregressive", "ngram")
        if (point := _draw(axes, report[name], name, INK))
    ]
    _frame(axes, drawn)
    _names(axes, report, colours)
    axes.set(xlabel="acceptance length (tau), tokens a round", ylabel="speed-up")


def shapes() -> list[Line2D]:
    """For the legend: what is filled and what is hollow."""
    return [
        Line2D([], [], color=INK, ls="", label=label, **SHAPES[name])
        for name, label in (("tree", "tree"), ("chain", "chain of the same draft"))
    ]


def _point(mode: Mode | None) -> Point | None:
    if mode is None or mode["acceptance_length"] is None or mode["speedup"] is None:
        return None
    tau, speedup = mode["acceptance_length"], mode["speedup"]
    return Point(
        tau=tau["mean"],
        speedup=speedup["mean"],
        taus=tau["ci95"] or [tau["mean"]] * 2,
        speedups=speedup["ci95"] or [speedup["mean"]] * 2,
    )


def _draw(axes: Axes, mode: Mode | None, name: str, colour: str) -> Point | None:
    """The mode and its intervals, both ways."""
    point = _point(mode)
    if point is not None:
        axes.plot(point.taus, [point.speedup] * 2, color=colour, lw=1.4, alpha=0.55)
        axes.plot([point.tau] * 2, point.speedups, color=colour, lw=1.4, alpha=0.55)
        axes.plot(point.tau, point.speedup, color=colour, ls="", zorder=3, **SHAPES[name])
    return point


def _frame(axes: Axes, points: list[Point]) -> None:
    """Limits around the intervals, and the lines that a point is read against."""
    right = max([1.2, *(tau for point in points for tau in point.taus)])
    speedups = [1.0, *(value for point in points for value in point.speedups)]
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


def _names(axes: Axes, report: Report, colours: list[str]) -> None:
    """What each point is, beside the picture and in its order; a draft is tied by its tree."""
    (_, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    ties = [(1.0, right, "autoregressive", INK)]  # at the end of its own line
    if point := _point(report["ngram"]):
        ties.append((point.speedup, point.tau, "n-gram lookup", INK))
    for colour, draft in zip(colours, report["drafts"], strict=True):
        if point := _point(draft["modes"]["tree"]):
            name = draft["name"] + (" (own target)" if draft["target"] else "")
            ties.append((point.speedup, point.tau, name, colour))
    ties.sort()
    heights = spread(
        [tie[0] for tie in ties], least=LINE_HEIGHT * (top - bottom), limits=(bottom, top)
    )
    for (speedup, tau, name, colour), height in zip(ties, heights, strict=True):
        axes.annotate(
            name, (tau, speedup), xytext=(1.02, height), textcoords=axes.get_yaxis_transform(),
            va="center", fontsize=9, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": colour, "lw": 0.7, "alpha": 0.7, "relpos": (0, 0.5),
                "shrinkA": 2, "shrinkB": 0 if tau == right else 5,
            },
        )  # fmt: skip


def spread(heights: list[float], *, least: float, limits: tuple[float, float]) -> list[float]:
    """Rising heights within limits, moved as little as can be to be `least` apart.

    >>> spread([1.0, 1.0, 5.0], least=0.5, limits=(0.0, 4.0))
    [0.75, 1.25, 4.0]
    """
    steps = least * np.arange(len(heights))
    bottom, top = limits
    fitted = isotonic_regression(np.array(heights) - steps).x
    return (fitted.clip(bottom, top - steps[-1]) + steps).tolist()
