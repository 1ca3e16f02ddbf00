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

from infer.report.views import INK, assign_draft_colors, has_several_drafts, list_colored_modes
from infer.results.curve import fit_rise, take_last_half
from infer.results.records import AUTOREGRESSIVE
from infer.results.schema import Mode, Report

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
CHAIN_STYLE: Any = {"marker": "o", "ms": 7, "mfc": "none", "mew": 1.6}


def render_plots(report: Report) -> dict[str, str]:
    """Return all plots as SVG, by title; with several drafts, the plot to choose by comes first."""
    plots = {}
    if has_several_drafts(report):
        plots["Speed-up against acceptance length"] = render_svg(report, plot_speedup_against_length)
    if any(draft.training for draft in report.drafts):
        plots["Acceptance length over tokens seen"] = render_svg(report, plot_training)
    plots["Acceptance by position"] = render_svg(report, plot_acceptance_by_position)
    return plots


def render_svg(report: Report, plot: Callable[[Axes, Report], None]) -> str:
    """Return one plot as an <svg> element without references to anything outside the page.

    The legend has an entry for each label that the plot gave.
    """
    with mpl.rc_context({**PLOT_STYLE, "svg.hashsalt": plot.__name__}):
        figure = Figure(figsize=(5.6, 4.0), layout="constrained")
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
    return svg.replace(INK, "currentColor")


def plot_speedup_against_length(axes: Axes, report: Report) -> None:
    """Plot each draft's tree and chain (hollow), lookup and autoregressive decoding."""
    modes = report.overall.modes
    _plot_point(axes, modes[AUTOREGRESSIVE], color=INK, label="autoregressive", marker="D", ms=6)
    _plot_point(axes, modes["ngram"], color=INK, label="n-gram lookup", marker="s", ms=6)
    for color, draft in assign_draft_colors(report):
        label = draft.name + (" (own target)" if draft.target else "")
        _plot_point(axes, modes[f"{draft.name}/chain"], color=color, **CHAIN_STYLE)
        _plot_point(axes, modes[f"{draft.name}/tree"], color=color, label=label, marker="o", ms=8)
    axes.axhline(1, color=INK, lw=0.8, ls=":")
    # Limits are those of the points: the line of no cost may leave the plot.
    axes.autoscale(enable=False)
    axes.axline((1, 1), slope=1, color=INK, lw=0.8, ls="--", label="speed-up = tau (no cost)")
    axes.set(xlabel="acceptance length (tau); hollow: chain of the same draft", ylabel="speed-up")


def _plot_point(axes: Axes, mode: Mode, *, color: str, **style: Any) -> None:
    """Plot the acceptance length and the speed-up of a mode with their intervals."""
    tau, speedup = mode.figures.acceptance_length, mode.figures.speedup
    if tau is None or speedup is None:
        return
    x, y = tau.mean, speedup.mean
    axes.plot(tau.ci95 or [x, x], [y, y], color=color, lw=1.4, alpha=0.55)
    axes.plot([x, x], speedup.ci95 or [y, y], color=color, lw=1.4, alpha=0.55)
    axes.plot(x, y, color=color, ls="", zorder=3, **style)


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
