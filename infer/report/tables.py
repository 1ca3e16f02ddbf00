"""The tables of a report: modes, gains, costs and losslessness; and the report as text."""

from collections.abc import Iterable
from typing import get_args

from rich.console import Console
from rich.text import Text

from infer.engine.phase_timer import PHASES
from infer.report.definitions import format_definitions, select_definitions
from infer.report.number_format import (
    ABSENT,
    Table,
    choose_console,
    format_estimate,
    format_lossless,
    format_millions,
    format_number,
    is_compared,
    to_rich_table,
)
from infer.report.prose import (
    append_remarks,
    build_headline,
    describe_bottlenecks,
    describe_training,
    describe_verdicts,
    explain_undecided,
    list_absences,
)
from infer.report.views import ModeView, find_baseline, has_several_drafts, list_modes, list_sections
from infer.results.records import AUTOREGRESSIVE
from infer.results.schema import DraftInfo, GainMetric, Mode, Report, Section
from models.io.console import CONSOLE

MODE_COLUMNS = ["tau", "delivered", "speed-up", "tokens/s", "lossless"]
# With them the terminal's table of one draft fits into 80 characters, unless verdicts are long;
# the verdict above it says how many tokens are delivered.
OVERVIEW_COLUMNS = ["tau", "speed-up", "lossless"]
SIDE_BY_SIDE_COLUMNS = [
    *("draft", "method", "M params", "MB", "draft ms", "verify ms"),
    *("chain tau", "tree tau", "speed-up", "lossless"),
]
MISMATCH_COLUMNS = ["mismatched", "near-tie gap", "explained gap", "beyond gap", "widest divergence"]
INTERVALS_NOTE = "Brackets: 95 % interval over prompts; parentheses: their number."


def build_tables(report: Report) -> list[Table]:
    """Build all tables that have rows, the most important ones first."""
    tables = [
        *([side_by_side_table(report)] if has_several_drafts(report) else []),
        summary_table(report),
        gain_table(report),
        split_table(report),
        batch_table(report),
        exactness_table(report),
    ]
    return [table for table in tables if table.rows]


def collect_definitions(tables: list[Table]) -> dict[str, str]:
    """Return the definitions of all figures in the tables."""
    return select_definitions(column for table in tables for column in table.columns[table.label_columns :])


def side_by_side_table(report: Report) -> Table:
    """Build a table of costs and speed-ups with a row for each draft and each mode without one."""
    modes = report.overall.modes
    plain, ngram = modes[AUTOREGRESSIVE], modes["ngram"]
    step = plain.split_ms and plain.split_ms.plain_step
    rows = [
        ["autoregressive", *[ABSENT] * 4, format_number(step), *_tau_cells(plain, None)],
        ["n-gram lookup", "ngram", "0", ABSENT, *_cost_cells(ngram), *_tau_cells(ngram, None)],
    ]
    for draft in report.drafts:
        chain, tree = (modes[f"{draft.name}/{name}"] for name in ("chain", "tree"))
        memory = draft.memory_bytes
        row = [
            draft.name,
            draft.method,
            format_millions(draft.parameters),
            format_millions(memory.weights + memory.state),
            *_cost_cells(tree),
            *_tau_cells(chain, tree, draft),
        ]
        rows.append(row)
    return Table(
        title="Drafts side by side",
        note=append_remarks(
            f"{format_definitions('tau', 'draft ms', 'verify ms', 'MB')} Costs and speed-up are "
            "the tree's (of lookup: the chain's). Brackets: 95 % interval over prompts.",
            report,
        ),
        columns=SIDE_BY_SIDE_COLUMNS,
        rows=rows,
        label_columns=2,
        stacked_headers=True,
    )


def summary_table(report: Report) -> Table:
    """Build a table with a row for each mode of each category and of all prompts."""
    return Table(
        title="Modes by category",
        note=append_remarks(f"{format_definitions(*MODE_COLUMNS[:4])} {INTERVALS_NOTE}", report),
        columns=["prompts", "mode", *MODE_COLUMNS],
        rows=[
            row
            for name, section in list_sections(report).items()
            for row in _mode_rows(name, section, list_modes(report, section), MODE_COLUMNS)
        ],
        label_columns=2,
    )


def overview_table(report: Report) -> Table:
    """Build a table with all modes on all prompts, then the tree in each category."""
    rows = []
    for name, section in list_sections(report).items():
        views = list_modes(report, section)
        shown = views if name == "all" else [view for view in views if view.name == "tree"]
        rows += _mode_rows(name, section, shown, OVERVIEW_COLUMNS)
    return Table(
        title="Modes",
        note=append_remarks(INTERVALS_NOTE, report),
        columns=["prompts", "mode", *OVERVIEW_COLUMNS],
        rows=rows,
        label_columns=2,
        footnotes=explain_undecided(report),
    )


def gain_table(report: Report) -> Table:
    """Build a table of the gains of each draft's modes over others."""
    return Table(
        title="Gains",
        note="Paired differences over the same prompts. No acceptance rate between a tree and a "
        "chain: they are not comparable.",
        columns=["prompts", "gain of", "tau", "acceptance rate", "speed-up"],
        rows=[
            [
                name,
                f"{view.label} over {other}",
                *(format_estimate(gain[metric], signed=True) for metric in get_args(GainMetric)),
            ]
            for name, section in list_sections(report).items()
            for view in list_modes(report, section)
            for other, gain in view.mode.gains.items()
        ],
        label_columns=2,
    )


def exactness_table(report: Report) -> Table:
    """Build a table of the comparison with the answers of autoregressive decoding."""
    return Table(
        title="Losslessness",
        note=append_remarks(
            "Answers compared with autoregressive decoding, token for token; in fp32 all must "
            f"match. {format_definitions('lossless')}",
            report,
        ),
        columns=["mode", "lossless", *MISMATCH_COLUMNS],
        rows=[
            [view.label, format_lossless(view.mode.verdict, view.draft), *_mismatch_cells(view.mode)]
            for view in list_modes(report)
        ],
        stacked_headers=True,
        footnotes=explain_undecided(report),
    )


def split_table(report: Report) -> Table:
    """Build a table of the parts of a round and their prediction; footnotes name the bottleneck of each main mode."""
    records = (
        {
            "mode": view.label,
            **{part.replace("_", " "): format_number(getattr(split, part)) for part in PHASES},
            "round": format_number(split.round),
            "fused round": format_number(split.fused_round),
            "predicted": format_number(view.mode.figures.predicted_speedup),
            "efficiency": format_number(view.mode.figures.efficiency),
        }
        for view in list_modes(report)
        if (split := view.mode.split_ms)
    )
    return Table.from_records(
        records,
        title="Where a round's time goes, ms",
        note="Parts of the unfused round, timed one after the other. "
        + format_definitions("round", "fused round", "predicted", "efficiency"),
        footnotes=describe_bottlenecks(report),
        stacked_headers=True,
    )


def batch_table(report: Report) -> Table:
    """Build a table of each draft's tree at every batch size, from one row up."""
    records = []
    for draft in report.drafts:
        tree = report.overall.modes[f"{draft.name}/tree"]
        one_row = (1, tree.figures, find_baseline(report, draft).figures.tokens_per_s, tree.verdict)
        lines = [(b.size, b, b.autoregressive_tokens_per_s, b.verdict) for b in draft.batches]
        records += [
            {
                "draft": draft.name,
                "batch": str(size),
                "speed-up": format_estimate(figures.speedup),
                "tokens/s": format_number(figures.tokens_per_s, decimals=1),
                "autoregressive tokens/s": format_number(plain_tokens_per_s, decimals=1),
                "tau": format_number(figures.acceptance_length),
                "lossless": format_lossless(verdict, draft),
            }
            for size, figures, plain_tokens_per_s, verdict in [one_row, *lines]
            if lines
        ]
    return Table.from_records(
        records,
        title="Speed-up against batch size",
        note="Tree and autoregressive decoding with that many rows at a time, all rows together. "
        "Brackets: 95 % interval over prompts. Answers are compared with autoregressive decoding "
        "of one row.",
        label_columns=2,
        stacked_headers=True,
    )


def _mode_rows(name: str, section: Section, views: Iterable[ModeView], columns: list[str]) -> list[list[str]]:
    """Return a row for each mode on the prompts of a section."""
    count = section.modes[AUTOREGRESSIVE].figures.prompts
    cells = [(view.label, _mode_cells(view)) for view in views]
    return [[f"{name} ({count})", label, *map(row.__getitem__, columns)] for label, row in cells]


def _mode_cells(view: ModeView) -> dict[str, str]:
    figures = view.mode.figures
    return {
        "tau": format_estimate(figures.acceptance_length),
        "delivered": format_number(figures.delivered_per_round),
        "speed-up": format_estimate(figures.speedup),
        "tokens/s": format_number(figures.tokens_per_s, decimals=1),
        "lossless": format_lossless(view.mode.verdict, view.draft),
    }


def _mismatch_cells(mode: Mode) -> list[str]:
    verdict = mode.verdict
    if not is_compared(verdict):
        return [ABSENT] * len(MISMATCH_COLUMNS)
    widest = max(verdict.divergences, key=lambda divergence: divergence.logit_gap, default=None)
    return [
        f"{verdict.mismatched_prompts} of {mode.figures.prompts}",
        f"{verdict.near_tie_gap:.3g}",
        f"{verdict.explained_gap:.3g}",
        str(verdict.divergences_beyond_gap),
        f"{widest.logit_gap:.3g} at {widest.prompt_id}:{widest.position}" if widest else ABSENT,
    ]


def _cost_cells(mode: Mode) -> list[str]:
    """Format milliseconds per round of the draft and of the verification."""
    split = mode.split_ms
    return [format_number(split.draft), format_number(split.verification)] if split else [ABSENT] * 2


def _tau_cells(chain: Mode, tree: Mode | None, draft: DraftInfo | None = None) -> list[str]:
    """Format tau of chain and tree, and speed-up and losslessness of the tree (or the chain)."""
    main_mode = tree or chain
    return [
        format_number(chain.figures.acceptance_length),
        format_number(tree and tree.figures.acceptance_length),
        format_estimate(main_mode.figures.speedup),
        format_lossless(main_mode.verdict, draft),
    ]


def render_markdown(report: Report) -> str:
    """Return the whole report as Markdown."""
    parts = [
        "# Speculative decoding report",
        *describe_verdicts(report),
        build_headline(report),
        *describe_training(report),
        *(f"- {line}" for line in list_absences(report)),
    ]
    tables, setup = build_tables(report), report.setup
    for table in tables:
        parts += [f"## {table.title}", table.note, table.render_markdown(), *(f"- {line}" for line in table.footnotes)]
    definitions = [f"- **{word}**: {meaning}." for word, meaning in collect_definitions(tables).items()]
    source = f"`{setup.command}`, {setup.created}, prompts sha256 {setup.prompts.sha256[:12]}\n"
    return "\n\n".join([*parts, "## Definitions", "\n".join(definitions), source])


def print_report(report: Report, output: Console = CONSOLE) -> None:
    """Print the verdicts and one table, which fit a screen: report.html has everything.

    The table is ruled on a terminal, and plain lines of 100 columns elsewhere.
    """
    console = choose_console(output)
    table = side_by_side_table(report) if has_several_drafts(report) else overview_table(report)
    console.print(*(Text(line, style="bold") for line in describe_verdicts(report)), sep="\n")
    console.print()
    console.print(to_rich_table(table, ruled=console.is_terminal))
    console.print(*map(Text, table.footnotes), Text(table.note, style="dim"), sep="\n")
    lines = (*list_absences(report), *describe_training(report))
    console.print(*map(Text, lines), sep="\n")
