"""The report as text: one set of tables, on the terminal, in report.md and in report.html."""

from rich.console import Console
from rich.text import Text

from infer.report.cost_tables import (
    batch_table,
    efficiency_table,
    latency_table,
    replay_table,
    split_table,
)
from infer.report.definitions import defined
from infer.report.length_table import by_length_table
from infer.report.mode_tables import (
    acceptance_table,
    exactness_table,
    gain_table,
    position_table,
    summary_table,
)
from infer.report.number_format import Table, rich_table
from infer.report.prose import absences, headline
from infer.report.side_by_side import side_by_side_table
from infer.report.views import Report, sections, several


def tables(report: Report) -> list[Table]:
    """All tables that have something to say, the important ones first."""
    return _filled(
        *([side_by_side_table(report)] if several(report) else []),
        summary_table(sections(report)),
        gain_table(sections(report)),
        split_table(report),
        efficiency_table(report),
        batch_table(report),
        acceptance_table(report),
        position_table(report),
        replay_table(report),
        by_length_table(report),
        exactness_table(report),
        latency_table(report),
    )


def _terminal_tables(report: Report) -> list[Table]:
    """What matters; of several drafts their trees, which is what fits."""
    many = several(report)
    return _filled(
        *([side_by_side_table(report)] if many else []),
        summary_table(sections(report), main=many),
        gain_table({"all": report}, main=many),
        split_table(report, main=True),
        batch_table(report),
        acceptance_table(report, main=True),
        *([] if many else [position_table(report)]),
        replay_table(report),
        exactness_table(report, main=many),
    )


def _filled(*found: Table) -> list[Table]:
    return [table for table in found if table.rows]


def used(found: list[Table]) -> dict[str, str]:
    """The definitions of every figure that the tables hold."""
    return defined(column for table in found for column in table.columns[table.labels :])


def markdown(report: Report) -> str:
    """The whole report for people who read text."""
    parts = [
        "# Speculative decoding report",
        headline(report),
        *(f"- {line}" for line in absences(report)),
    ]
    shown = tables(report)
    for table in shown:
        lines = [
            table.columns,
            ["---"] * table.labels + ["---:"] * (len(table.columns) - table.labels),
        ]
        parts += [
            f"## {table.title}",
            table.note,
            "\n".join(f"| {' | '.join(cells)} |" for cells in lines + table.rows),
            *(f"- {line}" for line in table.below),
        ]
    parts.append("## Definitions")
    parts.append("\n".join(f"- **{word}**: {meaning}." for word, meaning in used(shown).items()))
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
        for line in table.below:
            console.print(Text(line))
        console.print(Text(table.note, style="dim"))
