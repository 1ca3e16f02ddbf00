"""sample.html: documents with their answers marked, as one page that needs nothing else.

No network, no script, no font, and a policy that forbids them. Colour alone says nothing: answers
are underlined as well.
"""

from collections import Counter
from collections.abc import Mapping
from html import escape
from itertools import groupby

from data.chat.mask_check import Tally
from data.viewer.documents import NEWLINE, SHARE, Look, Shown, shortened, table, visible

MOST = 4000  # tokens of a document
STYLE = """
:root { color-scheme: light dark; --a: #00785a; --a-back: #009e7326; --s: #a1387d; --p: #5c5f66;
  --line: #8885; --card: #8881; --bad: #c1121f; }
@media (prefers-color-scheme: dark) { :root { --a: #3ddbae; --s: #f09ad2; --p: #a6a9b0;
  --bad: #ff8080; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; } h2 { font-size: 1rem; margin: 0; }
p, ul { font-size: .875rem; color: var(--p); margin: .25rem 0 1rem; padding: 0; list-style: none; }
.wide { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; text-align: right; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th { font-weight: 500; color: var(--p); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; min-width: 5rem;
  overflow-wrap: anywhere; }
.share { background: linear-gradient(90deg, var(--a-back) var(--part), transparent 0); }
tr.bad td { font-weight: 600; color: var(--bad); }
nav { position: sticky; top: 0; background: Canvas; color: var(--p); padding: .5rem 0;
  font-size: .875rem; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem;
  border-bottom: 1px solid var(--line); }
article { margin: 1.25rem 0; border: 1px solid var(--line); border-radius: .5rem; overflow: clip; }
header { background: var(--card); padding: .6rem .9rem; }
header p { margin: 0; }
.map { display: flex; height: .4rem; background: var(--line); }
.map i { min-width: 1px; } .map .a { background: var(--a); }
pre { white-space: pre-wrap; font: .85rem/1.8 ui-monospace, monospace; margin: 0;
  padding: .75rem .9rem; color: var(--p); }
.a { color: var(--a); background: var(--a-back); border-bottom: 1px solid;
  padding-bottom: .15em; }  /* clear of underscores */
.s { color: var(--s); } .a.s { font-weight: 600; }
.gap { font-style: italic; opacity: .7; border-bottom: none; }
pre i { opacity: .45; font-style: normal; }
b { font-weight: inherit; }
body:has(#edges:checked) pre b { outline: 1px solid var(--line); outline-offset: -1px; }
body:not(:has(#prompts:checked)) pre .p { display: none; }
@media (max-width: 40rem) { th, td { padding: .3rem .4rem; font-size: .75rem; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # even if something were not escaped
KEY = (
    '<nav><span><b class="a">what the target said</b>, learned</span><span>what it was shown</span>'
    '<span><b class="s">special tokens</b></span>'
    '<label><input type="checkbox" id="edges"> token boundaries</label>'
    '<label><input type="checkbox" id="prompts" checked> prompts</label></nav>'
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
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{_safe(heading)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>What a draft learns</h1>\n<p>of {_safe(source)}, in tokens of {_safe(target)}; "
        "a token under the pointer tells its id</p>\n"
        f"{_table(tallies)}<ul>{left_out}</ul>\n{KEY}\n{articles}\n</body></html>\n"
    )


def _table(tallies: Mapping[str, Tally]) -> str:
    head, *rows = table(tallies)
    cells = "".join(f"<th>{_safe(cell)}</th>" for cell in head)
    lines = "".join(
        f'<tr class="{"bad" if row[-2:] != ["0", "0"] else "good"}">'
        + "".join(
            f"<td{_part(name, cell)}>{_safe(cell)}</td>"
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _part(column: str, cell: str) -> str:
    """A share is drawn behind its figure."""
    return f' class="share" style="--part:{cell}"' if column == SHARE else ""


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
        f"<article><header><h2>{_safe(look.name)}</h2><p>{_safe(look.about)}</p></header>"
        f'<div class="map">{lengths}</div><pre>{text}</pre></article>'
    )


def _token(piece: Shown) -> str:
    kinds = ["a" if piece.answer else "p"] + ["s"] * piece.special + ["gap"] * piece.left_out
    ids = " ".join(map(str, piece.ids))
    text = escape(piece.text).replace(NEWLINE, f"<i>{NEWLINE}</i>")
    return f'<b class="{" ".join(kinds)}" title="{ids}">{text}</b>'


def _safe(text: str) -> str:
    return escape(visible(text))
