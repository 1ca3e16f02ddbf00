"""sample.html: documents with their answers marked, as one page that needs nothing else.

No network, no script, no font. Colour alone says nothing: answers are underlined as well.
"""

from collections import Counter
from collections.abc import Mapping
from html import escape
from itertools import groupby

from data.mask_check import Tally
from data.shown.documents import Look, Shown, shortened, table, visible

MOST = 4000  # tokens of a document
STYLE = """
:root { color-scheme: light dark; --a: #00785a; --a-back: #009e7326; --s: #a1387d; }
@media (prefers-color-scheme: dark) { :root { --a: #3ddbae; --a-back: #009e7340; --s: #f09ad2; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1rem; margin: 0 0 .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #8883; }
th:first-child, td:first-child { text-align: left; }
tr.bad td { font-weight: 600; color: #c1121f; }
@media (prefers-color-scheme: dark) { tr.bad td { color: #ff8080; } }
article { margin: 2rem 0; }
.map { display: flex; height: .5rem; background: #8883; margin-bottom: .5rem; }
.map i { min-width: 1px; } .map .a { background: var(--a); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.7 ui-monospace, monospace;
  margin: 0; border-left: 3px solid #8888; padding-left: .8rem; color: #666; }
@media (prefers-color-scheme: dark) { pre { color: #aaa; } }
.a { color: var(--a); background: var(--a-back); text-decoration: underline;
  text-underline-offset: .25em; text-decoration-skip-ink: none; }
.s { color: var(--s); } .a.s { font-weight: 700; }
.gap { font-style: italic; opacity: .7; text-decoration: none; }
#edges:checked ~ article b { outline: 1px solid #8886; outline-offset: -1px; }
#prompts:not(:checked) ~ article .p { display: none; }
b { font-weight: inherit; }
.note { font-size: .85rem; }
"""
LEGEND = (
    '<b class="a">what the target said: supervised</b>, what it was shown, '
    '<b class="s">special tokens</b>; a token under the pointer tells its id'
)


def page(
    source: str, target: str, looks: list[Look], tallies: Mapping[str, Tally], skipped: Counter[str]
) -> str:
    """The whole page."""
    left_out = "".join(
        f"<li>{count:,} left out: {_safe(reason)}</li>" for reason, count in skipped.most_common()
    )
    heading = f"What a draft learns of {source}"
    articles = "\n".join(_article(look) for look in looks)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(heading)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{_safe(heading)}</h1>\n"
        f'<p class="note">Tokens of {_safe(target)}.</p>\n'
        f"{_table(tallies)}<ul>{left_out}</ul>\n"
        f'<p class="note">{LEGEND}.</p>\n'
        '<input type="checkbox" id="edges"> <label for="edges">token boundaries</label>\n'
        '<input type="checkbox" id="prompts" checked> <label for="prompts">prompts</label>\n'
        f"{articles}\n</body></html>\n"
    )


def _table(tallies: Mapping[str, Tally]) -> str:
    head, *rows = table(tallies)
    cells = "".join(f"<th>{_safe(cell)}</th>" for cell in head)
    lines = "".join(
        f'<tr class="{"bad" if row[-2:] != ["0", "0"] else "good"}">'
        + "".join(f"<td>{_safe(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _article(look: Look) -> str:
    """A document: where its answers lie, and its text."""
    runs = [
        (answer, sum(len(piece.ids) for piece in run))
        for answer, run in groupby(look.pieces, key=lambda piece: piece.answer)
    ]
    lengths = "".join(
        f'<i class="{"a" if answer else "p"}" style="flex:{count}"></i>' for answer, count in runs
    )
    text = "".join(map(_token, shortened(look.pieces, MOST)))
    return (
        f'<article><h2>{_safe(look.title)}</h2><div class="map">{lengths}</div>'
        f"<pre>{text}</pre></article>"
    )


def _token(piece: Shown) -> str:
    kinds = ["a" if piece.answer else "p"] + ["s"] * piece.special + ["gap"] * piece.left_out
    ids = " ".join(map(str, piece.ids))
    return f'<b class="{" ".join(kinds)}" title="{ids}">{escape(piece.text)}</b>'


def _safe(text: str) -> str:
    return escape(visible(text))
