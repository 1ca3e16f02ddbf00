"""report.html: the report as one page that needs nothing else, no network, no script, no font."""

from html import escape
from typing import Any

from infer.report import sample_answers
from infer.report.definitions import POSITION, definition
from infer.report.number_format import Table
from infer.report.plots import plots
from infer.report.prose import absences, headline
from infer.report.tables import tables, used

STYLE = """
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


def page(report: dict[str, Any]) -> str:
    """The whole page."""
    absent = "".join(f"<li>{escape(line)}</li>" for line in absences(report))
    figures = "".join(
        f'<figure><figcaption>{escape(title)}</figcaption><div class="wide">{svg}</div></figure>'
        for title, svg in plots(report).items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    sha256 = f"prompts sha256 {report['prompts']['sha256']}"
    footer = " | ".join([report["command"], report["created"], versions, sha256])
    title = f"{report['target']['name']}: speculative decoding"
    shown = tables(report)
    first, *rest = [_table(table) for table in shown]
    others = "\n".join(rest)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{sample_answers.STYLE}</style></head><body>\n"
        f"<h1>Speculative decoding report</h1>\n<p>{escape(headline(report))}</p>\n"
        f"<ul>{absent}</ul>{first}\n{figures}\n{others}\n{sample_answers.answers_shown(report)}\n"
        f"{_definitions(shown)}\n<footer><p>{escape(footer)}</p></footer>\n</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(
        _cell(escape(column), "th", label=True)
        if index < table.labels
        else _cell(_word(column), "th", label=False)
        for index, column in enumerate(table.columns)
    )
    groups = [""] + [row[0] for row in table.rows]
    grouped = len(set(groups)) < len(groups)
    body = "".join(
        _row(row, labels=table.labels, starts=grouped and row[0] != before)
        for row, before in zip(table.rows, groups, strict=False)
    )
    below = "".join(f"<li>{escape(line)}</li>" for line in table.below)
    return (
        f'<h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div><ul>{below}</ul>"
    )


def _row(cells: list[str], *, labels: int, starts: bool) -> str:
    marked = "".join(
        _cell(escape(cell), "td", label=index < labels) for index, cell in enumerate(cells)
    )
    return f'<tr class="{"group" if starts else "row"}">{marked}</tr>'


def _cell(html: str, tag: str, *, label: bool) -> str:
    return f'<{tag} class="{"label" if label else "figure"}">{html}</{tag}>'


def _word(column: str) -> str:
    """A column's name; on hover its definition, which a click finds at the end of the page."""
    meaning = definition(column)
    if not meaning:
        return escape(column)
    goal = _anchor(POSITION if column.isdigit() else column)
    return f'<a href="#{goal}"><abbr title="{escape(meaning)}">{escape(column)}</abbr></a>'


def _definitions(shown: list[Table]) -> str:
    listed = "".join(
        f'<dt id="{_anchor(word)}">{escape(word)}</dt><dd>{escape(meaning)}.</dd>'
        for word, meaning in used(shown).items()
    )
    return f"<h2>Definitions</h2><dl>{listed}</dl>"


def _anchor(word: str) -> str:
    return "is-" + word.replace(" ", "-").replace("/", "-a-")
