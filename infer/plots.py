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

from infer.tables import modes_of, sections

# Drawn in this colour, shown in the page's text colour.
INK = "#010203"
# Middle tones that stand out on white and on black, and for colour-blind readers (Okabe and Ito).
COLOURS = ["#999999", "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#0072b2", "#b8a500"]
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

Report = dict[str, Any]


def plots(report: Report) -> dict[str, str]:
    """Every plot by its title."""
    return {
        "Acceptance by position": draw(report, by_position),
        "Acceptance length by category": draw(report, length_by_category),
        "Speed-up by category": draw(report, speedup_by_category),
        "Inter-token latency": draw(report, latency),
    }


def draw(report: Report, plot: Callable[[Axes, Report], None]) -> str:
    """One plot as an <svg> element without references to anything outside the page."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": plot.__name__}):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        plot(axes, report)
        marks = [
            Line2D([], [], color=c, marker="o", ms=4, label=m) for c, m, _ in _coloured(report)
        ]
        figure.legend(handles=marks, loc="outside right upper", fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # HTML parsers know the namespaces; the declarations would read as outside addresses.
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    return svg.replace(INK, "currentColor")


def by_position(axes: Axes, report: Report) -> None:
    """Marginal acceptance as lines; conditional, dotted, shows where the draft loses the thread."""
    for colour, _, mode in _coloured(report):
        positions = np.arange(1, mode["depth"] + 1)
        shares = mode["acceptance_by_position"]
        axes.plot(positions, shares["marginal"], color=colour, marker="o", ms=4)
        conditional = [np.nan if share is None else share for share in shares["conditional"]]
        axes.plot(positions, conditional, color=colour, ls=":", marker=".", ms=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        ylim=(0, 1.02), xlabel="draft position", ylabel="share of rounds (dotted: conditional)"
    )


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
    colours = {label: colour for colour, label, _ in _coloured(report)}
    several = len(report["drafts"]) > 1
    for key in report["per_prompt"][0]["modes"]:
        name, _, mode = key.rpartition("/")
        rows = [row["modes"][key]["itl_ms"] for row in report["per_prompt"]]
        if known := [value for value in rows if value is not None]:
            axes.ecdf(known, color=colours[f"{name} {mode}" if several and name else mode])
    axes.set(
        xlabel="inter-token latency of a prompt, ms", ylabel="share of prompts", ylim=(0, 1.02)
    )
    axes.set_xlim(left=0)


def _by_category(axes: Axes, report: Report, figure: str) -> None:
    groups = sections(report)
    num_modes = len(_coloured(report))
    for place, section in enumerate(groups.values()):
        for index, (colour, _, mode) in enumerate(_coloured(section)):
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


def _coloured(report: Report) -> list[tuple[str, str, dict[str, Any]]]:
    """Measured modes with a colour that is the same in every plot."""
    return [
        (COLOURS[index % len(COLOURS)], label, mode)
        for index, (label, mode, _) in enumerate(modes_of(report))
        if mode
    ]
