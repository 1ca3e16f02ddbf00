"""Two pictures of costs: the parts of a round against what it yields, and batches against speed."""

from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from infer.report.cost_tables import PARTS, batches, split_of
from infer.report.mode_tables import measured_of
from infer.report.palette import GREY, INK, PAPER, of_drafts
from infer.report.views import Mode, Report

OF_PARTS = dict(zip(PARTS, ["#0072b2", "#56b4e9", "#cc79a7", "#e69f00", GREY], strict=True))
TAU: dict[str, Any] = {"marker": "D", "ms": 6, "mfc": PAPER, "mec": INK}
FUSED: dict[str, Any] = {"marker": "|", "mew": 2.5, "color": INK}


def in_parts(report: Report) -> list[tuple[str, Mode, float]]:
    """Main modes that were taken apart, and milliseconds of the autoregressive step they are of."""
    found = []
    for label, mode in measured_of(report, main=True):
        split, costs = split_of(mode), mode["costs_ms"]
        if split and split["round"]:
            own = split["verify"] + split["accept"]
            found.append((label, mode, costs["autoregressive_step"] if costs else own))
    return found


def round_in_parts(axes: Axes, report: Report) -> None:
    """A bar a mode, in autoregressive steps; its tokens a round and the fused round beside it."""
    shown = in_parts(report)
    for row, (_, mode, step) in enumerate(shown):
        split = mode["split_ms"]
        widths = [max(0.0, split[part]) / step for part in PARTS]
        for part, width, end in zip(PARTS, widths, accumulate(widths), strict=True):
            axes.barh(row, width, left=end - width, height=0.55, color=OF_PARTS[part])
        if split["fused_round"]:
            axes.plot(split["fused_round"] / step, row, ls="", ms=16, **FUSED)
        if tau := mode["acceptance_length"]:
            axes.plot(tau["mean"], row, ls="", zorder=3, **TAU)
    axes.set_yticks(range(len(shown)), [label for label, *_ in shown])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="autoregressive steps; tokens a round", xlim=(0, None))


def parts() -> list[Patch | Line2D]:
    """For the legend, in the order of the bars."""
    return [
        *(Patch(color=colour, label=part.replace("_", " ")) for part, colour in OF_PARTS.items()),
        Line2D([], [], ls="", label="fused round", ms=10, **FUSED),
        Line2D([], [], ls="", label="tokens a round (tau)", **TAU),
    ]


def speedup_by_batch(axes: Axes, report: Report) -> None:
    """A line a draft, with intervals."""
    rows = batches(report)
    names = [draft["name"] for draft in report["drafts"]]
    for place, (colour, name) in enumerate(zip(of_drafts(report), names, strict=True)):
        line = [at for at in rows if at["draft"] == name]
        apart = 1 + 0.03 * (place - (len(names) - 1) / 2)  # or intervals would hide one another
        sizes = [at["batch"] * apart for at in line]
        axes.plot(sizes, [at["speedup"]["mean"] for at in line], color=colour, marker="o", ms=5)
        for size, at in zip(sizes, line, strict=True):
            if at["speedup"]["ci95"]:
                axes.plot([size] * 2, at["speedup"]["ci95"], color=colour, lw=2, alpha=0.6)
    sizes = sorted({at["batch"] for at in rows})
    axes.axhline(1, color=INK, lw=0.8, ls="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="rows decoded at a time", ylabel="speed-up")


def drafts(report: Report) -> list[Line2D]:
    """For the legend."""
    return [
        Line2D([], [], color=colour, marker="o", ms=5, label=f"{draft['name']} tree")
        for colour, draft in zip(of_drafts(report), report["drafts"], strict=True)
    ]
