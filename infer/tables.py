"""The report as tables of text: one set, shown on the terminal, in report.md and in report.html."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

# What fits beside the labels at 100 columns; report.json holds every position.
POSITIONS_SHOWN = 10
ABSENT = "-"

Report = dict[str, Any]
Mode = dict[str, Any]


@dataclass(kw_only=True)
class Table:
    """A titled table; the first `labels` columns name the row, the others hold figures."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    labels: int = 1


def modes_of(section: Report) -> Iterator[tuple[str, Mode | None, str]]:
    """Every mode of the report or of a category: label, mode or None, reason of the None."""
    yield "autoregressive", section["autoregressive"], ""
    yield "ngram", section["ngram"], section["not_measured"].get("ngram", "")
    for draft in section["drafts"]:
        for name, mode in draft["modes"].items():
            yield _label(section, draft, name), mode, draft["not_measured"].get(name, "")


def sections(report: Report) -> dict[str, Report]:
    """The categories by name, then all prompts together."""
    return {**report["categories"], "all": report}


def headline(report: Report) -> str:
    """What was measured, on what, in three sentences."""
    target, prompts, device = report["target"], report["prompts"], report["device"]
    tree = report["tree"]
    drafts = [
        f"{draft['name']} ({draft['method']}, {draft['parameters']:,} parameters)"
        for draft in report["drafts"]
    ]
    sampling = [f"{key} {value}" for key, value in report["sampling"].items() if value is not None]
    threads = f"{device['threads']} thread{'' if device['threads'] == 1 else 's'}"
    place = f"{device['name']} ({device['kind']}, {threads}"
    compiled = "compiled" if device["compiled"] else "not compiled"
    return (
        f"{target['name']} ({target['parameters']:,} parameters, {device['dtype']}) decoded with "
        f"{' and '.join(drafts) or 'no draft'} was compared with its own autoregressive decoding, "
        f"prompt by prompt in one run. {prompts['count']} held-out prompts in "
        f"{len(prompts['by_category'])} categories were continued by up to "
        f"{prompts['max_new_tokens']} tokens on {place}, {compiled}), {', '.join(sampling)}. "
        f"Tree: {tree['kind']}, {tree['nodes']} nodes of the draft up to depth {tree['depth']}, "
        f"{tree['copied'] or 'none'} copied by n-gram lookup."
    )


def tables(report: Report) -> list[Table]:
    """All tables, the important ones first."""
    return [
        summary_table(sections(report)),
        gain_table(sections(report)),
        position_table(report),
        exactness_table(report),
        latency_table(report),
        efficiency_table(report),
    ]


def summary_table(groups: dict[str, Report]) -> Table:
    rows = [
        [
            f"{name} ({section['autoregressive']['prompts']})",
            label,
            *(_mode_cells(mode) if mode else [ABSENT] * 4),
        ]
        for name, section in groups.items()
        for label, mode, _ in modes_of(section)
    ]
    return Table(
        title="Modes by category",
        note="tau: tokens a round, the target's own included. tokens/s and speed-up: of decoding, "
        "without the prefill. Brackets: 95 % interval over prompts; parentheses: their number.",
        columns=["prompts", "mode", "tau", "speed-up", "tokens/s", "lossless"],
        rows=rows,
        labels=2,
    )


def gain_table(groups: dict[str, Report]) -> Table:
    rows = [
        [
            name,
            f"{_label(section, draft, mode)} {other.replace('_', ' ')}",
            *(
                estimate(gain and gain[figure], signed=True)
                for figure in ("acceptance_length", "acceptance_rate", "speedup")
            ),
        ]
        for name, section in groups.items()
        for draft in section["drafts"]
        for mode, gains in draft["gain"].items()
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
    shown = [(label, mode) for label, mode, _ in modes_of(report) if mode and mode["depth"]]
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


def exactness_table(report: Report) -> Table:
    rows = [
        [
            label,
            "yes" if mode["lossless"] else "NO",
            f"{mode['mismatched_prompts']} of {mode['prompts']}",
            f"{mode['near_tie_gap']:.3g}",
            str(mode["divergences_beyond_gap"]),
            _first_divergence(mode),
        ]
        for label, mode, _ in modes_of(report)
        if mode
    ]
    return Table(
        title="Losslessness",
        note="Answers compared with autoregressive decoding, token for token. lossless: no "
        "divergence beyond the measured near-tie gap of the target's logits; in fp32 none at all.",
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
        [label, *(_percentiles(mode[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms"))]
        for label, mode, _ in modes_of(report)
        if mode
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
        for label, mode, _ in modes_of(report)
        if mode and (costs := mode["costs_ms"])
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


def absences(report: Report) -> list[str]:
    """One line for each mode that was not measured, with its reason."""
    return [
        f"{label}: not measured: {reason}" for label, mode, reason in modes_of(report) if not mode
    ]


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
    for table in (
        summary_table(sections(report)),
        gain_table({"all": report}),
        position_table(report),
        exactness_table(report),
    ):
        console.print()
        console.print(Text(table.title, style="bold"))
        console.print(_rich(table, ruled=console.is_terminal))
        console.print(Text(table.note, style="dim"))


def estimate(value: dict[str, Any] | None, *, signed: bool = False) -> str:
    """A mean and its interval: `2.31 [2.10, 2.52]`."""
    if value is None:
        return ABSENT
    mean = f"{value['mean']:+.2f}" if signed else f"{value['mean']:.2f}"
    if value["ci95"] is None:
        return f"{mean} [?]"
    low, high = value["ci95"]
    return f"{mean} [{low:.2f}, {high:.2f}]"


def number(value: float | None) -> str:
    """Two decimals, or a dash."""
    return ABSENT if value is None else f"{value:.2f}"


def _rich(table: Table, *, ruled: bool) -> RichTable:
    rich = RichTable(box=box.SIMPLE_HEAD if ruled else None, pad_edge=False, show_edge=False)
    for index, column in enumerate(table.columns):
        justify = "left" if index < table.labels else "right"
        rich.add_column(column, justify=justify, overflow="fold")
    for row, before in zip(table.rows, [None, *table.rows], strict=False):
        # A group is named once, as in a printed table.
        repeated = table.labels > 1 and before is not None and before[0] == row[0]
        rich.add_row(*(Text(cell) for cell in ([""] if repeated else row[:1]) + row[1:]))
    return rich


def _mode_cells(mode: Mode) -> list[str]:
    return [
        estimate(mode["acceptance_length"]),
        estimate(mode["speedup"]),
        f"{mode['tokens_per_s']['mean']:.1f}" if mode["tokens_per_s"] else ABSENT,
        "yes" if mode["lossless"] else "NO",
    ]


def _cells(values: list[float | None], width: int) -> list[str]:
    return [number(value) for value in values[:width]] + [""] * (width - len(values))


def _percentiles(value: dict[str, float] | None) -> str:
    return " / ".join(f"{value[key]:.1f}" for key in ("p50", "p90", "p99")) if value else ABSENT


def _first_divergence(mode: Mode) -> str:
    if not mode["divergences"]:
        return ABSENT
    widest = max(mode["divergences"], key=lambda divergence: divergence["logit_gap"])
    return f"{widest['logit_gap']:.3g} at {widest['prompt_id']}:{widest['position']}"


def _label(section: Report, draft: dict[str, Any], mode: str) -> str:
    return mode if len(section["drafts"]) == 1 else f"{draft['name']} {mode}"
