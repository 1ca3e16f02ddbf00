"""`python -m data.show`: show the tokens that a draft would train on, in color, before a run.

python -m data.show                                     the demo's prompts and the text that follows
python -m data.show data=prepared data.path=outputs/prepare/demo
python -m data.show data=jsonl data.path=FILE target=qwen3-8b documents=20 boundaries=true

Only the target's tokenizer is loaded. The page outputs/show/RUN/sample.html shows the same.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from conf.entry import entry_point
from data.chat.mask_check import MaskStats, check_mask_stats
from data.chat.tokenization import iter_unchecked_documents
from data.config import DataConf, DataSource, DemoAnswerSource
from data.demo.prompts import training_prompts
from data.packing.documents import Documents
from data.sources.row_formats import TokenizedDocument
from data.sources.tokenized import document_from_pair
from data.sources.training_rows import check_data
from data.viewer.documents import (
    DocumentView,
    build_mask_table,
    escape_unprintable,
    render_color,
    render_legend,
    render_plain,
    shorten_spans,
)
from data.viewer.html import render_page
from data.viewer.sample import sample_documents, sample_rows
from models.console import CONSOLE, print_table, setup_logging
from models.errors import UserError
from models.files import atomic_path, report_disk_errors
from models.target.target import TargetConf

log = logging.getLogger("data.show")
PLAIN_PRINT: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


@dataclass(kw_only=True)
class ShowConf:
    """Settings of `data.show`."""

    data: DataConf = field(default_factory=DataConf)
    target: TargetConf = field(default_factory=TargetConf)  # only its tokenizer is loaded
    documents: int = 6  # documents to show, from all categories in turn; with `packed`, rows
    packed: bool = False  # show rows of data.length, packed as in training
    read: int | None = 1000  # documents to read and sample from; null = all
    tokens: int = 300  # of a document in the terminal; longer runs lose their middle
    boundaries: bool = False  # mark token boundaries in the terminal; the page can always do so
    seed: int = 0  # of the sample
    run_name: str = "show"
    output_dir: str = "outputs/show"

    def __post_init__(self) -> None:
        for name in ("documents", "read", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, got {value}")
        if self.data.source is DataSource.captured:
            raise UserError(
                "data.source: data.show reads rows, got captured; show what the store was "
                "captured from"
            )
        if self.data.source is DataSource.demo and self.data.answers.by is DemoAnswerSource.target:
            raise UserError(
                "data.answers.by: data.show generates nothing, got target; take corpus, or show "
                "what `python -m data.prepare` wrote: data=prepared data.path=outputs/prepare/demo"
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
    stream = track_mask_stats(islice(stream_documents(conf, tokenizer, skipped), conf.read), stats)
    if conf.packed:
        documents = Documents.from_documents(stream)
        check_mask_stats(stats, skipped)
        views = list(sample_rows(documents, conf.data, conf.documents, tokenizer, seed=conf.seed))
    else:
        views = sample_documents(stream, conf.documents, tokenizer, seed=conf.seed)
    page = render_page(describe_source(conf), conf.target.name, views, stats, skipped)
    path = folder / "sample.html"
    with report_disk_errors(folder), atomic_path(path) as partial:
        partial.write_text(page)
    for view in views:
        print_document(view, conf)
    print_summary(stats, skipped)
    log.info("the same as a page: %s", path)
    check_mask_stats(stats, skipped)  # last, so that wrong masks are shown before they are refused


def track_mask_stats(
    documents: Iterable[TokenizedDocument], stats: dict[str, MaskStats]
) -> Iterator[TokenizedDocument]:
    """Yield the documents unchanged and count each in the stats of its category."""
    for document in documents:
        stats[document.category].add(document)
        yield document


def stream_documents(
    conf: ShowConf, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]
) -> Iterator[TokenizedDocument]:
    """Yield the documents of the data; demo prompts are followed by the text of their files."""
    if conf.data.source is not DataSource.demo:
        yield from iter_unchecked_documents(conf.data, tokenizer, skipped)
        return
    answers = conf.data.answers
    for prompt in training_prompts(answers.prompts, seed=conf.seed):
        prompt_ids, answer_ids = tokenizer([prompt.text, prompt.continuation])["input_ids"]
        document = document_from_pair(prompt_ids, answer_ids[: answers.max_new_tokens])
        yield replace(document, category=prompt.category)


def describe_source(conf: ShowConf) -> str:
    """Return the name of the data for the page."""
    return conf.data.path or "the demo's prompts, followed by the text of their files"


def print_document(view: DocumentView, conf: ShowConf) -> None:
    """Print one document, its answers in color or, without color, between marks."""
    spans = shorten_spans(view.spans, conf.tokens)
    if CONSOLE.color_system:
        CONSOLE.rule(Text(view.name, style="bold"), align="left", style="dim")
        CONSOLE.print(Text(view.description, style="dim"))
        CONSOLE.print(render_color(spans, boundaries=conf.boundaries), end="\n\n")
    else:
        CONSOLE.print(f"--- {view.name}, {view.description}", **PLAIN_PRINT)
        CONSOLE.print(render_plain(spans, boundaries=conf.boundaries), **PLAIN_PRINT)


def print_summary(stats: dict[str, MaskStats], skipped: Counter[str]) -> None:
    """Print the legend of the marks, the mask table by category and the counts of skipped rows."""
    if CONSOLE.color_system:
        CONSOLE.print(render_legend(), end="\n\n")
    columns, *rows = build_mask_table(stats)
    print_table(columns, rows)
    for reason, count in skipped.most_common():
        CONSOLE.print(f"{count:,} left out: {escape_unprintable(reason)}", **PLAIN_PRINT)


if __name__ == "__main__":
    main()
