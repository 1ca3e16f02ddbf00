"""The report's plots, as inline SVG that follows the light or dark colors of its page."""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from infer.report.cost_plots import list_split_modes, plot_round_split, plot_speedup_against_length
from infer.report.views import INK, PAPER, assign_draft_colors, has_several_drafts, list_colored_modes
from infer.results.curve import fit_rise, take_last_half
from infer.results.schema import Report

PLOT_STYLE: Any = {  # matplotlib types its keys as a closed set
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

FITTED_STYLE: Any = {"color": INK, "lw": 1.2, "ls": "--", "label": "least squares, last half"}
DEFAULT_SIZE = (5.6, 3.8)  # inches


def render_plots(report: Report) -> dict[str, str]:
    """Return all plots as SVG, by title; with several drafts, the plot to choose by comes first."""
    plots = {}
    if has_several_drafts(report):
        plots["Speed-up against acceptance length"] = render_svg(report, plot_speedup_against_length, size=(5.6, 4.6))
    if split_modes := list_split_modes(report):
        plots["Where a round's time goes"] = render_svg(
            report, plot_round_split, size=(5.6, 1.7 + 0.4 * len(split_modes))
        )
    if any(draft.training for draft in report.drafts):
        plots["Acceptance length over tokens seen"] = render_svg(report, plot_training)
    plots["Acceptance by position"] = render_svg(report, plot_acceptance_by_position)
    return plots


def render_svg(
    report: Report, plot: Callable[[Axes, Report], None], *, size: tuple[float, float] = DEFAULT_SIZE
) -> str:
    """Return one plot as an <svg> element without references to anything outside the page.

    The legend has an entry for each label that the plot gave.
    """
    with mpl.rc_context({**PLOT_STYLE, "svg.hashsalt": plot.__name__}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        plot(axes, report)
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), fontsize=9, loc="outside upper center", ncols=3)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # HTML needs no namespace declarations, and their URLs look like outside addresses.
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    return svg.replace(INK, "currentColor").replace(PAPER, "Canvas")


def plot_acceptance_by_position(axes: Axes, report: Report) -> None:
    """Plot marginal acceptance by draft position; with one draft, conditional acceptance too."""
    several = has_several_drafts(report)
    for color, view in list_colored_modes(report):
        positions = np.arange(1, view.mode.figures.depth + 1)
        shares = view.mode.figures.acceptance_by_position
        axes.plot(positions, shares.marginal, color=color, marker="o", ms=4, label=view.label)
        if not several:
            conditional = np.array(shares.conditional, dtype=np.float64)  # None becomes NaN
            axes.plot(positions, conditional, color=color, ls=":", marker=".", ms=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    dotted = "" if several else " (dotted: conditional)"
    axes.set(ylim=(0, 1.02), xlabel="draft position", ylabel=f"share of rounds{dotted}")


def plot_training(axes: Axes, report: Report) -> None:
    """Plot tau at each evaluation of a training, and the line that judges its last half.

    The axis is linear, like that line, whose slope is the rise a million tokens.
    """
    for color, draft in assign_draft_colors(report):
        if not (points := draft.training):
            continue
        millions, taus = [point.tokens / 1e6 for point in points], [point.tau for point in points]
        axes.plot(millions, taus, color=color, marker="o", ms=4, label=draft.name)
        if line := fit_rise(points):
            ends = [take_last_half(points)[0].tokens / 1e6, millions[-1]]
            axes.plot(ends, [line.value(x) for x in ends], zorder=3, **FITTED_STYLE)
    axes.set(xlabel="million tokens seen", xlim=(0, None), ylabel="acceptance length (tau)")
