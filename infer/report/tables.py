"""The report as text: tables for report.md, report.html and the terminal."""

from rich.console import Console
from rich.text import Text

from infer.report.cost_tables import (
    batch_table,
    efficiency_table,
    latency_table,
    replay_table,
    split_table,
)
from infer.report.definitions import select_definitions
from infer.report.length_table import prompt_length_table
from infer.report.mode_tables import (
    acceptance_table,
    exactness_table,
    gain_table,
    position_table,
    summary_table,
)
from infer.report.number_format import Table, to_rich_table
from infer.report.prose import build_headline, list_absences
from infer.report.side_by_side import side_by_side_table
from infer.report.views import ReportDict, collect_sections, has_several_drafts


def build_tables(report: ReportDict) -> list[Table]:
    """Build all tables that have rows, the important ones first."""
    return _drop_empty(
        *([side_by_side_table(report)] if has_several_drafts(report) else []),
        summary_table(collect_sections(report)),
        gain_table(collect_sections(report)),
        split_table(report),
        efficiency_table(report),
        batch_table(report),
        acceptance_table(report),
        position_table(report),
        replay_table(report),
        prompt_length_table(report),
        exactness_table(report),
        latency_table(report),
    )


def _build_terminal_tables(report: ReportDict) -> list[Table]:
    """Build the tables for a terminal; with several drafts they show only the trees, to fit."""
    several = has_several_drafts(report)
    return _drop_empty(
        *([side_by_side_table(report)] if several else []),
        summary_table(collect_sections(report), main=several),
        gain_table({"all": report}, main=several),
        split_table(report, main=True),
        batch_table(report),
        acceptance_table(report, main=True),
        *([] if several else [position_table(report)]),
        replay_table(report),
        exactness_table(report, main=several),
    )


def _drop_empty(*tables: Table) -> list[Table]:
    return [table for table in tables if table.rows]


def collect_definitions(tables: list[Table]) -> dict[str, str]:
    """Collect the definitions of all figures in the tables."""
    return select_definitions(
        column for table in tables for column in table.columns[table.label_columns :]
    )


def render_markdown(report: ReportDict) -> str:
    """Render the whole report as Markdown."""
    parts = [
        "# Speculative decoding report",
        build_headline(report),
        *(f"- {line}" for line in list_absences(report)),
    ]
    tables = build_tables(report)
    for table in tables:
        lines = [
            table.columns,
            ["---"] * table.label_columns + ["---:"] * (len(table.columns) - table.label_columns),
        ]
        parts += [
            f"## {table.title}",
            table.note,
            "\n".join(f"| {' | '.join(cells)} |" for cells in lines + table.rows),
            *(f"- {line}" for line in table.footnotes),
        ]
    parts.append("## Definitions")
    parts.append(
        "\n".join(
            f"- **{word}**: {meaning}." for word, meaning in collect_definitions(tables).items()
        )
    )
    origin = f"`{report['command']}`, {report['created']}"
    sha256 = f"prompts sha256 {report['prompts']['sha256'][:12]}"
    return "\n\n".join([*parts, f"{origin}, {sha256}"]) + "\n"


def print_report(report: ReportDict, console: Console | None = None) -> None:
    """Print the main tables: ruled on a terminal, plain lines of 100 columns elsewhere."""
    output = console or Console()
    plain = Console(file=output.file, width=100, color_system=None)
    console = output if output.is_terminal else plain
    console.print(Text(build_headline(report)))
    for line in list_absences(report):
        console.print(Text(line))
    for table in _build_terminal_tables(report):
        console.print()
        console.print(Text(table.title, style="bold"))
        console.print(to_rich_table(table, ruled=console.is_terminal))
        for line in table.footnotes:
            console.print(Text(line))
        console.print(Text(table.note, style="dim"))
