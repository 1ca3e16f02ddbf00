"""The report's plots, as inline SVG that follows the light or dark colors of its page."""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from infer.measure.curve import fit_rise, take_last_half
from infer.measure.report_schema import Report
from infer.report.cost_plots import (
    build_marker_legend,
    build_split_legend,
    list_split_modes,
    plot_round_split,
    plot_speedup_against_length,
    plot_speedup_by_batch,
)
from infer.report.cost_tables import collect_batch_rows
from infer.report.views import (
    INK,
    PAPER,
    assign_draft_colors,
    collect_sections,
    has_several_drafts,
    list_colored_modes,
)

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

FITTED_STYLE: Any = {"color": INK, "lw": 1.2, "ls": "--"}


def render_plots(report: Report) -> dict[str, str]:
    """Return all plots as SVG, by title; with several drafts, the plot to choose by comes first."""
    mode_lines = [
        Line2D([], [], color=color, marker="o", ms=4, label=view.label)
        for color, view, _ in list_colored_modes(report)
    ]
    mode_legend = {"handles": mode_lines, "loc": "outside upper center", "ncols": 3}
    marker_legend = {"handles": build_marker_legend(), "loc": "outside lower center", "ncols": 2}
    plots = {}
    if has_several_drafts(report):
        plots["Speed-up against acceptance length"] = render_svg(
            report, plot_speedup_against_length, marker_legend, size=(5.6, 4.6)
        )
    if split_modes := list_split_modes(report):
        legend = {"handles": build_split_legend(), "loc": "outside lower center", "ncols": 3}
        plots["Where a round's time goes"] = render_svg(
            report, plot_round_split, legend, size=(5.6, 1.7 + 0.4 * len(split_modes))
        )
    if collect_batch_rows(report):
        plots["Speed-up against batch size"] = render_svg(
            report, plot_speedup_by_batch, {"loc": "outside upper center", "ncols": 3}
        )
    if report.training:
        plots["Acceptance length over tokens seen"] = render_svg(
            report, plot_training,
            {"handles": build_training_legend(report), "loc": "outside upper center", "ncols": 3},
        )  # fmt: skip
    return plots | {
        "Acceptance by position": render_svg(report, plot_acceptance_by_position, mode_legend),
        "Acceptance length by category": render_svg(report, plot_length_by_category, mode_legend),
        "Speed-up by category": render_svg(report, plot_speedup_by_category, mode_legend),
        "Inter-token latency": render_svg(report, plot_latency, mode_legend),
    }


def render_svg(
    report: Report, plot: Callable[[Axes, Report], None], legend: dict[str, Any], *,
    size: tuple[float, float] = (5.6, 3.8),
) -> str:  # fmt: skip
    """Return one plot as an <svg> element without references to anything outside the page."""
    with mpl.rc_context({**PLOT_STYLE, "svg.hashsalt": plot.__name__}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        plot(axes, report)
        figure.legend(fontsize=9, **legend)
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
    for color, _, mode in list_colored_modes(report):
        positions = np.arange(1, mode.depth + 1)
        shares = mode.acceptance_by_position
        axes.plot(positions, shares.marginal, color=color, marker="o", ms=4)
        if not several:
            conditional = np.array(shares.conditional, dtype=np.float64)  # None becomes NaN
            axes.plot(positions, conditional, color=color, ls=":", marker=".", ms=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    dotted = "" if several else " (dotted: conditional)"
    axes.set(ylim=(0, 1.02), xlabel="draft position", ylabel=f"share of rounds{dotted}")


def plot_length_by_category(axes: Axes, report: Report) -> None:
    """Plot tokens per round, with intervals."""
    _plot_by_category(axes, report, "acceptance_length", label="acceptance length (tau)")


def plot_speedup_by_category(axes: Axes, report: Report) -> None:
    """Plot the speed-up over autoregressive decoding, with intervals."""
    _plot_by_category(axes, report, "speedup", label="speed-up over autoregressive")


def plot_latency(axes: Axes, report: Report) -> None:
    """Plot the cumulative distribution of inter-token latency over prompts."""
    for color, view, _ in list_colored_modes(report):
        latencies = [row.modes[view.key].itl_ms for row in report.per_prompt]
        if latencies := [value for value in latencies if value is not None]:
            axes.ecdf(latencies, color=color)
    axes.set(
        xlabel="inter-token latency of a prompt, ms", xlim=(0, None), ylabel="share of prompts",
        ylim=(0, 1.02),
    )  # fmt: skip


def plot_training(axes: Axes, report: Report) -> None:
    """Plot tau at each evaluation of a training, and the line that judges its last half.

    The axis is linear, like that line, whose slope is the rise a million tokens.
    """
    for color, draft in zip(assign_draft_colors(report), report.drafts, strict=True):
        points = report.training.get(draft.name, [])
        millions = [point.tokens / 1e6 for point in points]
        axes.plot(millions, [point.tau for point in points], color=color, marker="o", ms=4)
        if line := fit_rise(points):
            ends = [take_last_half(points)[0].tokens / 1e6, millions[-1]]
            axes.plot(ends, [line.value(x) for x in ends], zorder=3, **FITTED_STYLE)
    axes.set(xlabel="million tokens seen", xlim=(0, None), ylabel="acceptance length (tau)")


def build_training_legend(report: Report) -> list[Line2D]:
    """Return the entries of the legend: each draft that has a curve, and the line if one is fit."""
    drafts = zip(assign_draft_colors(report), report.drafts, strict=True)
    fitted = Line2D([], [], label="least squares, last half", **FITTED_STYLE)
    return [
        *(
            Line2D([], [], color=color, marker="o", ms=4, label=draft.name)
            for color, draft in drafts
            if draft.name in report.training
        ),
        *([fitted] if any(map(fit_rise, report.training.values())) else []),
    ]


def _plot_by_category(axes: Axes, report: Report, metric: str, *, label: str) -> None:
    sections = collect_sections(report)
    num_modes = len(list_colored_modes(report))
    for group, section in enumerate(sections.values()):
        for index, (color, _, mode) in enumerate(list_colored_modes(section)):
            if value := getattr(mode, metric):
                x = group + (index - (num_modes - 1) / 2) * 0.8 / num_modes
                axes.plot([x, x], value.ci95 or [value.mean] * 2, color=color, lw=2)
                axes.plot(x, value.mean, color=color, marker="o", ms=5)
    axes.axhline(1, color=INK, lw=0.8, ls="--")
    axes.set_xticks(range(len(sections)), list(sections))
    axes.set(ylim=(0, None), ylabel=label)
