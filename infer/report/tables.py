"""The report as text: tables for report.md, report.html and the terminal."""

from rich.console import Console
from rich.text import Text

from infer.report.cost_tables import batch_table, split_table
from infer.report.definitions import select_definitions
from infer.report.mode_tables import exactness_table, gain_table, overview_table, side_by_side_table, summary_table
from infer.report.number_format import Table, choose_console, to_rich_table
from infer.report.prose import build_headline, describe_training, describe_verdicts, list_absences
from infer.report.views import has_several_drafts
from infer.results.schema import Report
from models.io.console import CONSOLE


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
