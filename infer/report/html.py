"""report.html: the report as one page without scripts, fonts or anything else from a network."""

from html import escape
from typing import Any

from infer.report import sample_answers
from infer.report.definitions import POSITION_COLUMN, get_definition
from infer.report.number_format import Table
from infer.report.plots import render_plots
from infer.report.prose import build_headline, list_absences
from infer.report.tables import build_tables, collect_definitions

PAGE_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid #8883; }
th.label, td.label { text-align: left; }
tr.group td { border-top: 2px solid #8888; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; } svg { max-width: 100%; height: auto; }
abbr { text-decoration: underline dotted; cursor: help; }
th a { color: inherit; text-decoration: none; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.5rem; }
@media (max-width: 40rem) { svg { max-width: none; } }
.note, footer, dl { opacity: .8; font-size: .85rem; }
"""


def render_page(report: dict[str, Any]) -> str:
    """Render the whole page."""
    absences = "".join(f"<li>{escape(line)}</li>" for line in list_absences(report))
    figures = "".join(
        f'<figure><figcaption>{escape(title)}</figcaption><div class="wide">{svg}</div></figure>'
        for title, svg in render_plots(report).items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    sha256 = f"prompts sha256 {report['prompts']['sha256']}"
    footer = " | ".join([report["command"], report["created"], versions, sha256])
    title = f"{report['target']['name']}: speculative decoding"
    tables = build_tables(report)
    first_table, *rest = [_render_table(table) for table in tables]
    other_tables = "\n".join(rest)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}{sample_answers.ANSWER_STYLE}</style>"
        "</head><body>\n"
        f"<h1>Speculative decoding report</h1>\n<p>{escape(build_headline(report))}</p>\n"
        f"<ul>{absences}</ul>{first_table}\n{figures}\n{other_tables}\n{sample_answers.render_samples(report)}\n"
        f"{_render_definitions(tables)}\n<footer><p>{escape(footer)}</p></footer>\n</body></html>\n"
    )


def _render_table(table: Table) -> str:
    head = "".join(
        _render_cell(escape(column), "th", is_label=True)
        if index < table.label_columns
        else _render_cell(_render_column_name(column), "th", is_label=False)
        for index, column in enumerate(table.columns)
    )
    groups = [""] + [row[0] for row in table.rows]
    grouped = len(set(groups)) < len(groups)
    body = "".join(
        _render_row(
            row, label_columns=table.label_columns, starts_group=grouped and row[0] != previous
        )
        for row, previous in zip(table.rows, groups, strict=False)
    )
    footnotes = "".join(f"<li>{escape(line)}</li>" for line in table.footnotes)
    return (
        f'<h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div><ul>{footnotes}</ul>"
    )


def _render_row(cells: list[str], *, label_columns: int, starts_group: bool) -> str:
    columns = "".join(
        _render_cell(escape(cell), "td", is_label=index < label_columns)
        for index, cell in enumerate(cells)
    )
    return f'<tr class="{"group" if starts_group else "row"}">{columns}</tr>'


def _render_cell(html: str, tag: str, *, is_label: bool) -> str:
    return f'<{tag} class="{"label" if is_label else "figure"}">{html}</{tag}>'


def _render_column_name(column: str) -> str:
    """Render a column's name: hovering shows its definition, a click goes to the list of them."""
    definition = get_definition(column)
    if not definition:
        return escape(column)
    anchor = _anchor_id(POSITION_COLUMN if column.isdigit() else column)
    return f'<a href="#{anchor}"><abbr title="{escape(definition)}">{escape(column)}</abbr></a>'


def _render_definitions(tables: list[Table]) -> str:
    entries = "".join(
        f'<dt id="{_anchor_id(term)}">{escape(term)}</dt><dd>{escape(definition)}.</dd>'
        for term, definition in collect_definitions(tables).items()
    )
    return f"<h2>Definitions</h2><dl>{entries}</dl>"


def _anchor_id(term: str) -> str:
    return "is-" + term.replace(" ", "-").replace("/", "-a-")
