"""The report's plots, as inline SVG that follows the light or dark colours of its page."""

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

from infer.report.cost_plots import drafts, in_parts, parts, round_in_parts, speedup_by_batch
from infer.report.cost_tables import batches
from infer.report.palette import INK, PAPER, coloured
from infer.report.tradeoff_plot import shapes, speedup_against_length
from infer.report.views import Mode, Report, sections, several

STYLE: Any = {  # matplotlib types its keys as a closed set
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


def plots(report: Report) -> dict[str, str]:
    """Every plot by its title, the one to choose a draft by first."""
    modes = [
        Line2D([], [], color=colour, marker="o", ms=4, label=one.label)
        for colour, one in coloured(report)
        if one.mode
    ]
    beside = {"handles": modes, "loc": "outside right upper"}
    below = {"handles": shapes(), "loc": "outside lower center", "ncols": 2}
    found = {}
    if several(report):
        title = "Speed-up against acceptance length"
        found[title] = draw(report, speedup_against_length, below, size=(8.4, 4.6))
    if shown := in_parts(report):
        title = "Where a round's time goes"
        listed = {"handles": parts(), "loc": "outside lower center", "ncols": 4}
        found[title] = draw(report, round_in_parts, listed, size=(7.2, 1.5 + 0.4 * len(shown)))
    if batches(report):
        listed = {"handles": drafts(report), "loc": "outside right upper"}
        found["Speed-up against batch size"] = draw(report, speedup_by_batch, listed)
    return found | {
        "Acceptance by position": draw(report, by_position, beside),
        "Acceptance length by category": draw(report, length_by_category, beside),
        "Speed-up by category": draw(report, speedup_by_category, beside),
        "Inter-token latency": draw(report, latency, beside),
    }


def draw(
    report: Report, plot: Callable[[Axes, Report], None], legend: dict[str, Any], *,
    size: tuple[float, float] = (7.2, 3.6),
) -> str:  # fmt: skip
    """One plot as an <svg> element without references to anything outside the page."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": plot.__name__}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        plot(axes, report)
        figure.legend(fontsize=9, **legend)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # HTML parsers know the namespaces; the declarations would read as outside addresses.
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    return svg.replace(INK, "currentColor").replace(PAPER, "Canvas")


def by_position(axes: Axes, report: Report) -> None:
    """Marginal acceptance as lines; conditional, dotted, shows where the draft loses the thread."""
    for colour, mode in _measured(report):
        positions = np.arange(1, mode["depth"] + 1)
        shares = mode["acceptance_by_position"]
        axes.plot(positions, shares["marginal"], color=colour, marker="o", ms=4)
        if not several(report):
            conditional = [np.nan if share is None else share for share in shares["conditional"]]
            axes.plot(positions, conditional, color=colour, ls=":", marker=".", ms=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    dotted = "" if several(report) else " (dotted: conditional)"
    axes.set(ylim=(0, 1.02), xlabel="draft position", ylabel=f"share of rounds{dotted}")


def length_by_category(axes: Axes, report: Report) -> None:
    """Tokens a round, with intervals."""
    _by_category(axes, report, "acceptance_length")
    axes.set_ylabel("acceptance length (tau)")


def speedup_by_category(axes: Axes, report: Report) -> None:
    """Speed over autoregressive decoding, with intervals."""
    _by_category(axes, report, "speedup")
    axes.set_ylabel("speed-up over autoregressive")


def latency(axes: Axes, report: Report) -> None:
    """The share of prompts answered at most so slowly."""
    for colour, one in coloured(report):
        rows = [row["modes"].get(one.key, {}).get("itl_ms") for row in report["per_prompt"]]
        if known := [value for value in rows if value is not None]:
            axes.ecdf(known, color=colour)
    axes.set(
        xlabel="inter-token latency of a prompt, ms", ylabel="share of prompts", ylim=(0, 1.02)
    )
    axes.set_xlim(left=0)


def _by_category(axes: Axes, report: Report, figure: str) -> None:
    groups = sections(report)
    num_modes = len(_measured(report))
    for place, section in enumerate(groups.values()):
        for index, (colour, mode) in enumerate(_measured(section)):
            x = place + (index - (num_modes - 1) / 2) * 0.8 / num_modes
            _dot(axes, x, mode[figure], colour)
    axes.axhline(1, color=INK, lw=0.8, ls="--")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylim(bottom=0)


def _dot(axes: Axes, x: float, value: dict[str, Any] | None, colour: str) -> None:
    if value is None:
        return
    low, high = value["ci95"] or [value["mean"]] * 2
    axes.plot([x, x], [low, high], color=colour, lw=2)
    axes.plot(x, value["mean"], color=colour, marker="o", ms=5)


def _measured(section: Report) -> list[tuple[str, Mode]]:
    return [(colour, one.mode) for colour, one in coloured(section) if one.mode]
