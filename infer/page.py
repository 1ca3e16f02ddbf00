"""report.html: the report as one page that needs nothing else, no network, no script, no font."""

from html import escape
from typing import Any

from infer.cells import Table
from infer.plots import plots
from infer.tables import tables
from infer.words import absences, headline

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid #8883; }
th.label, td.label { text-align: left; }
tr.group td { border-top: 2px solid #8888; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; } svg { max-width: 100%; height: auto; }
.note, footer { opacity: .75; font-size: .85rem; }
"""


def page(report: dict[str, Any]) -> str:
    """The whole page."""
    absent = "".join(f"<li>{escape(line)}</li>" for line in absences(report))
    figures = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in plots(report).items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    sha256 = f"prompts sha256 {report['prompts']['sha256']}"
    footer = " | ".join([report["command"], report["created"], versions, sha256])
    title = f"{report['target']['name']}: speculative decoding"
    first, *rest = [_table(table) for table in tables(report)]
    others = "\n".join(rest)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>Speculative decoding report</h1>\n<p>{escape(headline(report))}</p>\n"
        f"<ul>{absent}</ul>{first}\n{figures}\n{others}\n"
        f"<footer><p>{escape(footer)}</p></footer>\n</body></html>\n"
    )


def _table(table: Table) -> str:
    head = _row(table.columns, tag="th", labels=table.labels)
    groups = [""] + [row[0] for row in table.rows]
    grouped = len(set(groups)) < len(groups)
    body = "".join(
        _row(row, tag="td", labels=table.labels, starts=grouped and row[0] != before)
        for row, before in zip(table.rows, groups, strict=False)
    )
    return (
        f'<h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>'
        f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    )


def _row(cells: list[str], *, tag: str, labels: int, starts: bool = False) -> str:
    marked = "".join(
        f'<{tag} class="{"label" if index < labels else "figure"}">{escape(cell)}</{tag}>'
        for index, cell in enumerate(cells)
    )
    return f'<tr class="{"group" if starts else "row"}">{marked}</tr>'
