"""The plots of costs: the parts of a round, and speed-up against acceptance length, to choose a draft by."""

from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes

from infer.engine.phase_timer import PHASES
from infer.report.views import GRAY, INK, PAPER, ModeView, assign_draft_colors, list_modes
from infer.results.records import AUTOREGRESSIVE
from infer.results.schema import Mode, Report

PART_COLORS = dict(zip(PHASES, ["#0072b2", "#56b4e9", "#cc79a7", "#e69f00", GRAY], strict=True))
TAU_STYLE: dict[str, Any] = {"marker": "D", "ms": 6, "mfc": PAPER, "mec": INK}
FUSED_STYLE: dict[str, Any] = {"marker": "|", "ms": 16, "mew": 2.5, "color": INK}
CHAIN_STYLE: dict[str, Any] = {"marker": "o", "ms": 7, "mfc": PAPER, "mew": 1.6}


def list_split_modes(report: Report) -> list[ModeView]:
    """Return the main modes whose rounds were timed by part."""
    views = list_modes(report, main=True)
    return [view for view in views if view.mode.split_ms and view.mode.split_ms.round]


def plot_round_split(axes: Axes, report: Report) -> None:
    """Plot a bar for each mode, in autoregressive steps, and tau and the fused round as markers."""
    views = list_split_modes(report)
    for row, view in enumerate(views):
        split, costs = view.mode.split_ms, view.mode.costs_ms
        assert split is not None
        # Autoregressive decoding has no costs of its own.
        step = costs.autoregressive_step if costs else split.plain_step
        widths = [max(0.0, getattr(split, part)) / step for part in PHASES]
        for part, width, end in zip(PHASES, widths, accumulate(widths), strict=True):
            axes.barh(row, width, left=end - width, height=0.55, color=PART_COLORS[part], label=part.replace("_", " "))
        if split.fused_round:
            axes.plot(split.fused_round / step, row, ls="", label="fused round", **FUSED_STYLE)
        if tau := view.mode.figures.acceptance_length:
            label = "tokens per round (tau)"
            axes.plot(tau.mean, row, ls="", zorder=3, label=label, **TAU_STYLE)
    axes.set_yticks(range(len(views)), [view.label for view in views])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="autoregressive steps; tokens per round", xlim=(0, None))


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
