"""Two plots of costs: the parts of a round beside its yield, and speed-up against batch size."""

from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from infer.report.cost_tables import ROUND_PARTS, collect_batch_rows, get_split
from infer.report.mode_tables import list_measured_modes
from infer.report.palette import GRAY, INK, PAPER, assign_draft_colors
from infer.report.views import ModeDict, ReportDict

PART_COLORS = dict(
    zip(ROUND_PARTS, ["#0072b2", "#56b4e9", "#cc79a7", "#e69f00", GRAY], strict=True)
)
TAU_STYLE: dict[str, Any] = {"marker": "D", "ms": 6, "mfc": PAPER, "mec": INK}
FUSED_STYLE: dict[str, Any] = {"marker": "|", "mew": 2.5, "color": INK}


def list_split_modes(report: ReportDict) -> list[tuple[str, ModeDict, float]]:
    """List the main modes whose rounds were timed by part, with the unit of each bar.

    The unit is the time of the autoregressive step in milliseconds.
    """
    modes = []
    for label, mode in list_measured_modes(report, main=True):
        split, costs = get_split(mode), mode["costs_ms"]
        if split and split["round"]:
            # Autoregressive decoding has no costs of its own: these two parts are its step.
            step = split["verify"] + split["accept"]
            modes.append((label, mode, costs["autoregressive_step"] if costs else step))
    return modes


def plot_round_split(axes: Axes, report: ReportDict) -> None:
    """Plot a bar for each mode, in autoregressive steps, and tau and the fused round as markers."""
    modes = list_split_modes(report)
    for row, (_, mode, step) in enumerate(modes):
        split = mode["split_ms"]
        widths = [max(0.0, split[part]) / step for part in ROUND_PARTS]
        for part, width, end in zip(ROUND_PARTS, widths, accumulate(widths), strict=True):
            axes.barh(row, width, left=end - width, height=0.55, color=PART_COLORS[part])
        if split["fused_round"]:
            axes.plot(split["fused_round"] / step, row, ls="", ms=16, **FUSED_STYLE)
        if tau := mode["acceptance_length"]:
            axes.plot(tau["mean"], row, ls="", zorder=3, **TAU_STYLE)
    axes.set_yticks(range(len(modes)), [label for label, *_ in modes])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="autoregressive steps; tokens a round", xlim=(0, None))


def build_split_legend() -> list[Patch | Line2D]:
    """Build the legend, in the order of the parts of a bar."""
    return [
        *(Patch(color=color, label=part.replace("_", " ")) for part, color in PART_COLORS.items()),
        Line2D([], [], ls="", label="fused round", ms=10, **FUSED_STYLE),
        Line2D([], [], ls="", label="tokens a round (tau)", **TAU_STYLE),
    ]


def plot_speedup_by_batch(axes: Axes, report: ReportDict) -> None:
    """Plot a line for each draft, with intervals."""
    rows = collect_batch_rows(report)
    names = [draft["name"] for draft in report["drafts"]]
    for index, (color, name) in enumerate(zip(assign_draft_colors(report), names, strict=True)):
        line = [row for row in rows if row["draft"] == name]
        # A small shift keeps the intervals of drafts from hiding each other.
        shift = 1 + 0.03 * (index - (len(names) - 1) / 2)
        sizes = [row["batch"] * shift for row in line]
        axes.plot(sizes, [row["speedup"]["mean"] for row in line], color=color, marker="o", ms=5)
        for size, row in zip(sizes, line, strict=True):
            if row["speedup"]["ci95"]:
                axes.plot([size] * 2, row["speedup"]["ci95"], color=color, lw=2, alpha=0.6)
    sizes = sorted({row["batch"] for row in rows})
    axes.axhline(1, color=INK, lw=0.8, ls="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="rows decoded at a time", ylabel="speed-up")


def build_draft_legend(report: ReportDict) -> list[Line2D]:
    """Build the legend, one line for each draft."""
    return [
        Line2D([], [], color=color, marker="o", ms=5, label=f"{draft['name']} tree")
        for color, draft in zip(assign_draft_colors(report), report["drafts"], strict=True)
    ]
