"""Show the tokens that a draft would train on in the terminal, in color, and as a page."""

import logging
from collections import Counter, defaultdict
from itertools import groupby, islice
from pathlib import Path

from rich.text import Text

from data.chat.mask_check import MaskStats, check_mask_stats, track_mask_stats
from data.chat.tokenization import iter_demo_documents, iter_documents
from data.config import DataSource, ShowConf
from data.viewer.documents import (
    NEWLINE_MARK,
    SHARE_COLUMN,
    DocumentView,
    TokenSpan,
    build_mask_table,
    escape_unprintable,
    render_color,
    render_legend,
    render_plain,
    sample_documents,
    shorten_spans,
)
from models.io.console import CONSOLE, print_line, print_table
from models.io.files import report_disk_errors, write_text_atomically
from models.io.pages import render_html
from models.targets.pretrained import load_tokenizer, read_vocab_size

log = logging.getLogger("data.show")
PAGE_TEMPLATE = Path(__file__).with_name("sample.html.j2")
MAX_PAGE_TOKENS = 4000  # of a document


def show_documents(conf: ShowConf) -> None:
    """Show a sample of the documents in the terminal and as a page; check all that are read."""
    folder = Path(conf.output_dir) / conf.run_name
    with report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(conf.target)
    skipped: Counter[str] = Counter()
    stats: defaultdict[str, MaskStats] = defaultdict(MaskStats)
    documents = (
        iter_demo_documents(conf.data.demo, tokenizer, seed=conf.seed)
        if conf.data.source is DataSource.demo
        else iter_documents(conf.data, tokenizer, skipped, read_vocab_size(conf.target))
    )
    counted = track_mask_stats(islice(documents, conf.read), stats)
    views = sample_documents(counted, conf.documents, tokenizer, seed=conf.seed)
    source = conf.data.path or "the demo's prompts, followed by the text of their files"
    with report_disk_errors(folder):
        write_text_atomically(folder / "sample.html", render_page(source, conf.target.name, views, stats, skipped))
    for view in views:
        print_document(view, conf)
    print_summary(stats, skipped)
    log.info("the same as a page: %s", folder / "sample.html")
    check_mask_stats(stats, skipped)  # last, so that wrong masks are shown before they are rejected


def print_document(view: DocumentView, conf: ShowConf) -> None:
    """Print one document, its answers in color or, without color, between marks."""
    spans = shorten_spans(view.spans, conf.tokens)
    if CONSOLE.color_system:
        CONSOLE.rule(Text(view.name, style="bold"), align="left", style="dim")
        CONSOLE.print(Text(view.description, style="dim"))
        CONSOLE.print(render_color(spans), end="\n\n")
    else:
        print_line(f"--- {view.name}, {view.description}")
        print_line(render_plain(spans))


def print_summary(stats: dict[str, MaskStats], skipped: Counter[str]) -> None:
    """Print the legend of the marks, the mask table by category and the counts of skipped rows."""
    if CONSOLE.color_system:
        CONSOLE.print(render_legend(), end="\n\n")
    columns, *rows = build_mask_table(stats)
    print_table(columns, rows)
    for reason, count in skipped.most_common():
        print_line(f"{count:,} left out: {escape_unprintable(reason)}")


def render_page(
    source: str, target: str, views: list[DocumentView], stats_by_category: dict[str, MaskStats], skipped: Counter[str]
) -> str:
    """Return the documents as one self-contained page; answers are underlined for readers who do not see the colors."""
    columns, *rows = build_mask_table(stats_by_category)
    return render_html(
        PAGE_TEMPLATE,
        filters={"printable": escape_unprintable},
        source=source,
        target=target,
        columns=columns,
        rows=rows,
        skipped=skipped,
        share_column=SHARE_COLUMN,
        newline_mark=NEWLINE_MARK,
        articles=[(view, _measure_runs(view.spans), shorten_spans(view.spans, MAX_PAGE_TOKENS)) for view in views],
    )


def _measure_runs(spans: list[TokenSpan]) -> list[tuple[bool, int]]:
    """Return whether each run is an answer, and its tokens, for the bar that shows the runs."""
    runs = groupby(spans, key=lambda span: span.answer)
    return [(answer, sum(len(span.ids) for span in run)) for answer, run in runs]
