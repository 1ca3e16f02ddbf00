"""The report as tables of text: one set, shown on the terminal, in report.md and in report.html."""

from rich.console import Console
from rich.text import Text

from infer.cells import ABSENT, Table, estimate, lossless, number, percentiles, rich_table
from infer.modes import Mode, Report, label_of, modes_of, sections, several
from infer.side_by_side import side_by_side_table
from infer.words import absences, headline, remarked

# What fits beside the labels at 100 columns; report.json holds every position.
POSITIONS_SHOWN = 10


def tables(report: Report) -> list[Table]:
    """All tables, the important ones first."""
    return [
        *([side_by_side_table(report)] if several(report) else []),
        summary_table(sections(report)),
        gain_table(sections(report)),
        position_table(report),
        exactness_table(report),
        latency_table(report),
        efficiency_table(report),
    ]


def summary_table(groups: dict[str, Report], *, main: bool = False) -> Table:
    rows = [
        [
            f"{name} ({section['autoregressive']['prompts']})",
            one.label,
            *(_mode_cells(one.mode) if one.mode else [ABSENT] * 4),
        ]
        for name, section in groups.items()
        for one in modes_of(section, main=main)
    ]
    return Table(
        title="Modes by category",
        note=remarked(
            "tau: tokens a round, the target's own included. tokens/s and speed-up: of decoding, "
            "without the prefill. Brackets: 95 % interval over prompts; parentheses: their number.",
            groups["all"],
        ),
        columns=["prompts", "mode", "tau", "speed-up", "tokens/s", "lossless"],
        rows=rows,
        labels=2,
    )


def gain_table(groups: dict[str, Report], *, main: bool = False) -> Table:
    rows = [
        [
            name,
            f"{label_of(section, draft, mode)} {other.replace('_', ' ')}",
            *(
                estimate(gain and gain[figure], signed=True)
                for figure in ("acceptance_length", "acceptance_rate", "speedup")
            ),
        ]
        for name, section in groups.items()
        for draft in section["drafts"]
        for mode, gains in draft["gain"].items()
        if mode == "tree" or not main
        for other, gain in gains.items()
    ]
    return Table(
        title="Gains",
        note="Paired differences over the same prompts. No acceptance rate between a tree and a "
        "chain: they are not comparable.",
        columns=["prompts", "gain of", "tau", "acceptance rate", "speed-up"],
        rows=rows,
        labels=2,
    )


def position_table(report: Report) -> Table:
    shown = [(label, mode) for label, mode in _measured(report) if mode["depth"]]
    depth = min(POSITIONS_SHOWN, max((mode["depth"] for _, mode in shown), default=0))
    rows = [
        [label, kind, *_cells(mode["acceptance_by_position"][kind], depth)]
        for label, mode in shown
        for kind in ("marginal", "conditional")
    ]
    return Table(
        title="Acceptance by position",
        note="marginal: share of rounds that accept at least so many draft tokens; conditional: "
        "among rounds that accepted the one before.",
        columns=["mode", "share", *(str(position + 1) for position in range(depth))],
        rows=rows,
        labels=2,
    )


def exactness_table(report: Report, *, main: bool = False) -> Table:
    """If `main`, of several drafts the trees and whatever answered otherwise."""
    shown = {one.label for one in modes_of(report, main=True)}
    rows = [
        [
            label,
            lossless(mode),
            f"{mode['mismatched_prompts']} of {mode['prompts']}",
            f"{mode['near_tie_gap']:.3g}",
            str(mode["divergences_beyond_gap"]),
            _first_divergence(mode),
        ]
        for label, mode in _measured(report)
        if not main or label in shown or mode["mismatched_prompts"]
    ]
    return Table(
        title="Losslessness",
        note=remarked(
            "Answers compared with autoregressive decoding, token for token. lossless: no "
            "divergence beyond the measured near-tie gap of the target's logits; in fp32 none at "
            "all.",
            report,
        ),
        columns=[
            "mode",
            "lossless",
            "mismatched",
            "near-tie gap",
            "beyond it",
            "widest divergence",
        ],
        rows=rows,
    )


def latency_table(report: Report) -> Table:
    rows = [
        [label, *(percentiles(mode[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms"))]
        for label, mode in _measured(report)
    ]
    return Table(
        title="Latency, ms",
        note="p50 / p90 / p99 over prompts. TTFT: time to first token; ITL: (E2E - TTFT) / "
        "(tokens - 1); E2E: the whole request.",
        columns=["mode", "TTFT", "ITL", "E2E"],
        rows=rows,
    )


def efficiency_table(report: Report) -> Table:
    rows = [
        [
            label,
            number(mode["speedup"] and mode["speedup"]["mean"]),
            number(mode["predicted_speedup"]),
            number(mode["efficiency"]),
            *(number(costs[key]) for key in ("draft", "verify", "autoregressive_step")),
            ABSENT if mode["graphs_after_warmup"] is None else str(mode["graphs_after_warmup"]),
        ]
        for label, mode in _measured(report)
        if (costs := mode["costs_ms"])
    ]
    return Table(
        title="Efficiency",
        note="efficiency: measured speed-up / predicted; predicted: tau x step / (draft + verify), "
        "each in ms a round.",
        columns=[
            "mode",
            "speed-up",
            "predicted",
            "efficiency",
            "draft",
            "verify",
            "step",
            "new graphs",
        ],
        rows=rows,
    )


def markdown(report: Report) -> str:
    """The whole report for people who read text."""
    parts = [
        "# Speculative decoding report",
        headline(report),
        *(f"- {line}" for line in absences(report)),
    ]
    for table in tables(report):
        lines = [
            table.columns,
            ["---"] * table.labels + ["---:"] * (len(table.columns) - table.labels),
        ]
        parts += [
            f"## {table.title}",
            table.note,
            "\n".join(f"| {' | '.join(cells)} |" for cells in lines + table.rows),
        ]
    origin = f"`{report['command']}`, {report['created']}"
    sha256 = f"prompts sha256 {report['prompts']['sha256'][:12]}"
    return "\n\n".join([*parts, f"{origin}, {sha256}"]) + "\n"


def terminal_table(report: Report, console: Console | None = None) -> None:
    """Print what matters: ruled on a terminal, plain aligned lines of 100 columns elsewhere."""
    given = console or Console()
    plain = Console(file=given.file, width=100, color_system=None)
    console = given if given.is_terminal else plain
    console.print(Text(headline(report)))
    for line in absences(report):
        console.print(Text(line))
    for table in _terminal_tables(report):
        console.print()
        console.print(Text(table.title, style="bold"))
        console.print(rich_table(table, ruled=console.is_terminal))
        console.print(Text(table.note, style="dim"))


def _terminal_tables(report: Report) -> list[Table]:
    """What matters; of several drafts their trees, which is what fits."""
    many = several(report)
    return [
        *([side_by_side_table(report)] if many else []),
        summary_table(sections(report), main=many),
        gain_table({"all": report}, main=many),
        *([] if many else [position_table(report)]),
        exactness_table(report, main=many),
    ]


def _measured(report: Report) -> list[tuple[str, Mode]]:
    return [(one.label, one.mode) for one in modes_of(report) if one.mode]


def _mode_cells(mode: Mode) -> list[str]:
    return [
        estimate(mode["acceptance_length"]),
        estimate(mode["speedup"]),
        f"{mode['tokens_per_s']['mean']:.1f}" if mode["tokens_per_s"] else ABSENT,
        lossless(mode),
    ]


def _cells(values: list[float | None], width: int) -> list[str]:
    return [number(value) for value in values[:width]] + [""] * (width - len(values))


def _first_divergence(mode: Mode) -> str:
    if not mode["divergences"]:
        return ABSENT
    widest = max(mode["divergences"], key=lambda divergence: divergence["logit_gap"])
    return f"{widest['logit_gap']:.3g} at {widest['prompt_id']}:{widest['position']}"
