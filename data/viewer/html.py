"""sample.html: documents with their answers marked, as one self-contained page.

The page uses no network, script or font, and its content policy forbids them. Answers are
underlined as well as colored, for readers who do not see the colors.
"""

from collections import Counter
from collections.abc import Mapping
from html import escape
from itertools import groupby

from data.chat.mask_check import MaskStats
from data.viewer.documents import (
    NEWLINE_MARK,
    SHARE_COLUMN,
    DocumentView,
    TokenSpan,
    build_mask_table,
    escape_unprintable,
    shorten_spans,
)

MAX_TOKENS = 4000  # tokens shown of a document
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
# a second line of defense in case some text is not escaped
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LEGEND_HTML = (
    '<nav><span><b class="a">answers</b>, trained on</span><span>prompts</span>'
    '<span><b class="s">special tokens</b></span>'
    '<label><input type="checkbox" id="edges"> token boundaries</label>'
    '<label><input type="checkbox" id="prompts" checked> prompts</label></nav>'
)


def render_page(
    source: str,
    target: str,
    views: list[DocumentView],
    stats_by_category: Mapping[str, MaskStats],
    skipped: Counter[str],
) -> str:
    """Render the page."""
    left_out = "".join(
        f"<li>{count:,} left out: {_escape_html(reason)}</li>"
        for reason, count in skipped.most_common()
    )
    heading = f"Training data of a draft: {source}"
    articles = "\n".join(_render_article(view) for view in views)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        f"<title>{_escape_html(heading)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>Training data of a draft</h1>\n<p>{_escape_html(source)}, tokenized for "
        f"{_escape_html(target)}; hover over a token to see its id</p>\n"
        f"{_render_table(stats_by_category)}<ul>{left_out}</ul>\n{LEGEND_HTML}\n{articles}\n</body></html>\n"
    )


def _render_table(stats_by_category: Mapping[str, MaskStats]) -> str:
    head, *rows = build_mask_table(stats_by_category)
    cells = "".join(f"<th>{_escape_html(cell)}</th>" for cell in head)
    lines = "".join(
        f'<tr class="{"bad" if row[-2:] != ["0", "0"] else "good"}">'
        + "".join(
            f"<td{_share_attributes(name, cell)}>{_escape_html(cell)}</td>"
            for name, cell in zip(head, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _share_attributes(column: str, cell: str) -> str:
    """Return the attributes that draw a share as a bar behind its number."""
    return f' class="share" style="--part:{cell}"' if column == SHARE_COLUMN else ""


def _render_article(view: DocumentView) -> str:
    """Render a document: a bar that shows where its answers are, and its text."""
    runs = [
        (answer, sum(len(span.ids) for span in run))
        for answer, run in groupby(view.spans, key=lambda span: span.answer)
    ]
    bar = "".join(
        f'<i class="{"a" if answer else "p"}" style="flex:{count}"></i>' for answer, count in runs
    )
    text = "".join(map(_render_span, shorten_spans(view.spans, MAX_TOKENS)))
    return (
        f"<article><header><h2>{_escape_html(view.name)}</h2>"
        f"<p>{_escape_html(view.description)}</p></header>"
        f'<div class="map">{bar}</div><pre>{text}</pre></article>'
    )


def _render_span(span: TokenSpan) -> str:
    classes = ["a" if span.answer else "p"] + ["s"] * span.special + ["gap"] * span.left_out
    ids = " ".join(map(str, span.ids))
    text = escape(span.text).replace(NEWLINE_MARK, f"<i>{NEWLINE_MARK}</i>")
    return f'<b class="{" ".join(classes)}" title="{ids}">{text}</b>'


def _escape_html(text: str) -> str:
    return escape(escape_unprintable(text))
