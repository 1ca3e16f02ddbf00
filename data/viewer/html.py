"""sample.html: documents with their answers marked, as one self-contained page.

`sample.html.j2` is the page, whose texts are escaped. Answers are underlined as well as colored,
for readers who do not see the colors.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

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
from models.io.pages import render_html

TEMPLATE = Path(__file__).with_name("sample.html.j2")
MAX_TOKENS = 4000  # tokens shown of a document


def render_page(
    source: str,
    target: str,
    views: list[DocumentView],
    stats_by_category: Mapping[str, MaskStats],
    skipped: Counter[str],
) -> str:
    """Return the page as HTML."""
    columns, *rows = build_mask_table(stats_by_category)
    return render_html(
        TEMPLATE,
        filters={"printable": escape_unprintable},
        source=source,
        target=target,
        columns=columns,
        rows=rows,
        skipped=skipped,
        share_column=SHARE_COLUMN,
        newline_mark=NEWLINE_MARK,
        articles=[(view, _measure_runs(view.spans), shorten_spans(view.spans, MAX_TOKENS)) for view in views],
    )


def _measure_runs(spans: list[TokenSpan]) -> list[tuple[bool, int]]:
    """Return whether each run is an answer, and its tokens, for the bar that shows the runs."""
    runs = groupby(spans, key=lambda span: span.answer)
    return [(answer, sum(len(span.ids) for span in run)) for answer, run in runs]
