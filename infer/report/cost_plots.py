"""The plots of costs: the parts of a round, speed-up against batch size, and the trade-off.

The trade-off is the plot to choose a draft by: speed-up against acceptance length. A draft that
cost nothing would lie on its line speed-up = tau; the distance below it is the cost.
"""

from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.optimize import isotonic_regression

from infer.measure.intervals import Estimate
from infer.measure.report_schema import ModeSection, Report
from infer.report.cost_tables import ROUND_PARTS, collect_batch_rows
from infer.report.views import GRAY, INK, PAPER, assign_draft_colors, list_measured_modes

PART_COLORS = dict(
    zip(ROUND_PARTS, ["#0072b2", "#56b4e9", "#cc79a7", "#e69f00", GRAY], strict=True)
)
TAU_STYLE: dict[str, Any] = {"marker": "D", "ms": 6, "mfc": PAPER, "mec": INK}
FUSED_STYLE: dict[str, Any] = {"marker": "|", "mew": 2.5, "color": INK}
LABEL_SPACING = 0.062  # between two labels, as a share of the plot's height
MODE_MARKERS: dict[str, Any] = {
    "tree": {"marker": "o", "ms": 8},
    "chain": {"marker": "o", "ms": 7, "mfc": PAPER, "mew": 1.6},
    "ngram": {"marker": "s", "ms": 6.5, "mfc": PAPER, "mew": 1.6},
    "autoregressive": {"marker": "D", "ms": 6},
}


def list_split_modes(report: Report) -> list[tuple[str, ModeSection]]:
    """Return the main modes whose rounds were timed by part, with their labels."""
    return [
        (label, mode)
        for label, mode in list_measured_modes(report, main=True)
        if mode.split_ms and mode.split_ms.round
    ]


def plot_round_split(axes: Axes, report: Report) -> None:
    """Plot a bar for each mode, in autoregressive steps, and tau and the fused round as markers."""
    modes = list_split_modes(report)
    for row, (_, mode) in enumerate(modes):
        split, costs = mode.split_ms, mode.costs_ms
        assert split is not None
        # Autoregressive decoding has no costs of its own.
        step = costs.autoregressive_step if costs else split.plain_step
        widths = [max(0.0, getattr(split, part)) / step for part in ROUND_PARTS]
        for part, width, end in zip(ROUND_PARTS, widths, accumulate(widths), strict=True):
            axes.barh(row, width, left=end - width, height=0.55, color=PART_COLORS[part])
        if split.fused_round:
            axes.plot(split.fused_round / step, row, ls="", ms=16, **FUSED_STYLE)
        if tau := mode.acceptance_length:
            axes.plot(tau.mean, row, ls="", zorder=3, **TAU_STYLE)
    axes.set_yticks(range(len(modes)), [label for label, _ in modes])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="autoregressive steps; tokens per round", xlim=(0, None))


def build_split_legend() -> list[Patch | Line2D]:
    """Return the entries of the legend, in the order of the parts of a bar."""
    return [
        *(Patch(color=color, label=part.replace("_", " ")) for part, color in PART_COLORS.items()),
        Line2D([], [], ls="", label="fused round", ms=10, **FUSED_STYLE),
        Line2D([], [], ls="", label="tokens per round (tau)", **TAU_STYLE),
    ]


def plot_speedup_by_batch(axes: Axes, report: Report) -> None:
    """Plot a line for each draft, with intervals."""
    rows, drafts = collect_batch_rows(report), report.drafts
    for index, (color, draft) in enumerate(zip(assign_draft_colors(report), drafts, strict=True)):
        line = [row for row in rows if row.draft == draft.name]
        # A small shift keeps the intervals of drafts from hiding each other.
        shift = 1 + 0.03 * (index - (len(drafts) - 1) / 2)
        sizes = [row.batch * shift for row in line]
        axes.plot(
            sizes, [row.speedup.mean for row in line], color=color, marker="o", ms=5,
            label=f"{draft.name} tree",
        )  # fmt: skip
        for size, row in zip(sizes, line, strict=True):
            if row.speedup.ci95:
                axes.plot([size] * 2, row.speedup.ci95, color=color, lw=2, alpha=0.6)
    sizes = sorted({row.batch for row in rows})
    axes.axhline(1, color=INK, lw=0.8, ls="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_xticks([], minor=True)
    axes.set(xlabel="rows decoded at a time", ylabel="speed-up", ylim=(0, None))


def plot_speedup_against_length(axes: Axes, report: Report) -> None:
    """Plot each draft's chain and tree, joined; and n-gram lookup and autoregressive decoding."""
    colors = assign_draft_colors(report)
    drafts = list(zip(colors, report.drafts, strict=True))
    for color, draft in drafts:
        ends = [mode for name in ("chain", "tree") if (mode := _get_plotted(draft.modes[name]))]
        axes.plot([tau.mean for tau, _ in ends], [y.mean for _, y in ends], color=color, lw=1.6)
    modes = [
        (draft.modes[name], name, color) for color, draft in drafts for name in ("chain", "tree")
    ]
    modes += [(report.autoregressive, "autoregressive", INK), (report.ngram, "ngram", INK)]
    points = [(name, color, *point) for mode, name, color in modes if (point := _get_plotted(mode))]
    for name, color, tau, speedup in points:
        x, y = tau.mean, speedup.mean
        axes.plot(tau.ci95 or [x, x], [y, y], color=color, lw=1.4, alpha=0.55)
        axes.plot([x, x], speedup.ci95 or [y, y], color=color, lw=1.4, alpha=0.55)
        axes.plot(x, y, color=color, ls="", zorder=3, **MODE_MARKERS[name])
    _set_limits(
        axes,
        taus=[value for *_, tau, _ in points for value in tau.ci95 or [tau.mean]],
        speedups=[value for *_, speedup in points for value in speedup.ci95 or [speedup.mean]],
    )
    _label_points(axes, report, colors)
    axes.set(xlabel="acceptance length (tau), tokens per round", ylabel="speed-up")


def build_marker_legend() -> list[Line2D]:
    """Return the legend's entries for filled and hollow markers."""
    return [
        Line2D([], [], color=INK, ls="", label=label, **MODE_MARKERS[name])
        for name, label in (("tree", "tree"), ("chain", "chain of the same draft"))
    ]


def _get_plotted(mode: ModeSection | None) -> tuple[Estimate, Estimate] | None:
    """Return the acceptance length and the speed-up of a mode, or None if it lacks either."""
    if mode is None or mode.acceptance_length is None or mode.speedup is None:
        return None
    return mode.acceptance_length, mode.speedup


def _set_limits(axes: Axes, *, taus: list[float], speedups: list[float]) -> None:
    """Set limits around the intervals, and draw the two lines of reference."""
    right = max([1.2, *taus])
    low, high = min([1.0, *speedups]), max([1.0, *speedups])
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


def _label_points(axes: Axes, report: Report, colors: list[str]) -> None:
    """Label the points on the right, in order of height; a draft's label is tied to its tree."""
    (_, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    ties = [(1.0, right, "autoregressive", INK)]  # at the right end of the dotted line
    modes = [(report.ngram, "n-gram lookup", INK)] + [
        (draft.modes["tree"], draft.name + (" (own target)" if draft.target else ""), color)
        for color, draft in zip(colors, report.drafts, strict=True)
    ]
    ties += [
        (point[1].mean, point[0].mean, name, color)
        for mode, name, color in modes
        if (point := _get_plotted(mode))
    ]
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
    """Return rising heights, moved as little as possible to be `min_gap` apart and within limits.

    >>> spread_labels([1.0, 1.0, 5.0], min_gap=0.5, limits=(0.0, 4.0))
    [0.75, 1.25, 4.0]
    """
    offsets = min_gap * np.arange(len(heights))
    bottom, top = limits
    # Heights are `min_gap` apart exactly if they still rise without their offsets.
    fitted = isotonic_regression(np.array(heights) - offsets).x
    return (fitted.clip(bottom, top - offsets[-1]) + offsets).tolist()
