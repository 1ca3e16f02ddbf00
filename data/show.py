"""`python -m data.show`: show the tokens that a draft would train on, in color, before a run.

python -m data.show                                     the demo's prompts and the text that follows
python -m data.show data=prepared data.path=outputs/prepare/demo
python -m data.show data=jsonl data.path=FILE target=qwen3-8b documents=20 boundaries=true

Only the target's tokenizer is loaded. The page outputs/show/RUN/sample.html shows the same.
"""

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rich.text import Text

from conf.entry import entry_point
from data.chat.mask_check import MaskStats, check_mask_stats, track_mask_stats
from data.chat.tokenization import iter_demo_documents, iter_unchecked_documents
from data.config import DataConf, DataSource, DemoAnswerSource
from data.packing.documents import Documents
from data.sources.training_rows import check_data
from data.viewer.documents import (
    DocumentView,
    build_mask_table,
    escape_unprintable,
    render_color,
    render_legend,
    render_plain,
    sample_documents,
    sample_rows,
    shorten_spans,
)
from data.viewer.html import render_page
from models.console import CONSOLE, print_line, print_table, setup_logging
from models.errors import require
from models.files import report_disk_errors, write_text_atomically
from models.target.target import TargetConf
from models.validation import at_least, check_values

log = logging.getLogger("data.show")


@dataclass(kw_only=True)
class ShowConf:
    """Settings of `data.show`."""

    data: DataConf = field(default_factory=DataConf)
    target: TargetConf = field(default_factory=TargetConf)  # only its tokenizer is loaded
    documents: int = 6  # documents to show, from all categories in turn; with `packed`, rows
    packed: bool = False  # show rows of data.row_length, packed as in training
    read: int | None = 1000  # documents to read and sample from; null = all
    tokens: int = 300  # of a document in the terminal; longer runs lose their middle
    boundaries: bool = False  # mark token boundaries in the terminal; the page can always do so
    seed: int = 0  # of the sample
    run_name: str = "show"
    output_dir: str = "outputs/show"

    def __post_init__(self) -> None:
        check_values(self, documents=at_least(1), read=at_least(1), tokens=at_least(1))
        require(
            self.data.source is not DataSource.captured,
            "data.source: data.show reads rows, got captured; show what the store was captured "
            "from",
        )
        require(
            self.data.source is not DataSource.demo
            or self.data.answers.source is not DemoAnswerSource.target,
            "data.answers.source: data.show generates nothing, got target; take corpus, or show "
            "what `python -m data.prepare` wrote: data=prepared data.path=outputs/prepare/demo",
        )


@entry_point("show", ShowConf)
def main(conf: ShowConf) -> None:
    setup_logging()
    check_data(conf.data)
    folder = Path(conf.output_dir) / conf.run_name
    with report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = conf.target.load_tokenizer()
    skipped: Counter[str] = Counter()
    stats: defaultdict[str, MaskStats] = defaultdict(MaskStats)
    documents = (
        iter_demo_documents(conf.data.answers, tokenizer, seed=conf.seed)
        if conf.data.source is DataSource.demo
        else iter_unchecked_documents(conf.data, tokenizer, skipped)
    )
    stream = track_mask_stats(islice(documents, conf.read), stats)
    if conf.packed:
        packable = Documents.from_documents(stream)
        check_mask_stats(stats, skipped)
        views = list(sample_rows(packable, conf.data, conf.documents, tokenizer, seed=conf.seed))
    else:
        views = sample_documents(stream, conf.documents, tokenizer, seed=conf.seed)
    source = conf.data.path or "the demo's prompts, followed by the text of their files"
    with report_disk_errors(folder):
        write_text_atomically(
            folder / "sample.html",
            render_page(source, conf.target.name, views, stats, skipped),
        )
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
        CONSOLE.print(render_color(spans, boundaries=conf.boundaries), end="\n\n")
    else:
        print_line(f"--- {view.name}, {view.description}", markup=False)
        print_line(render_plain(spans, boundaries=conf.boundaries), markup=False)


def print_summary(stats: dict[str, MaskStats], skipped: Counter[str]) -> None:
    """Print the legend of the marks, the mask table by category and the counts of skipped rows."""
    if CONSOLE.color_system:
        CONSOLE.print(render_legend(), end="\n\n")
    columns, *rows = build_mask_table(stats)
    print_table(columns, rows)
    for reason, count in skipped.most_common():
        print_line(f"{count:,} left out: {escape_unprintable(reason)}", markup=False)


if __name__ == "__main__":
    main()
