"""`python -m data.show`: what a draft would learn of the data, coloured, before anything runs.

python -m data.show                                         the demo's prompts, as their texts go on
python -m data.show data=prepared data.path=outputs/prepare/demo
python -m data.show data=jsonl data.path=FILE target=qwen3-8b documents=20 boundaries=true

Only the target's tokenizer is read. The same goes into a page: outputs/show/RUN/sample.html.
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
from data.chat.mask_check import Tally, refuse_bad
from data.chat.tokenization import unchecked
from data.config import Author, DataConf, Source
from data.demo.prompts import training_prompts
from data.packing.documents import Documents
from data.sources.row_formats import Tokenised
from data.sources.tokenized import from_pair
from data.sources.training_rows import check
from data.viewer.documents import Look, in_colour, in_plain, legend, shortened, table, visible
from data.viewer.html import page
from data.viewer.sample import some_documents, some_rows
from models.checkpoint import atomic_path, writing
from models.console import CONSOLE, say_table, speak
from models.errors import UserError
from models.target.target import TargetConf

log = logging.getLogger("data.show")
PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


@dataclass(kw_only=True)
class ShowConf:
    """Configures `data.show`."""

    data: DataConf = field(default_factory=DataConf)
    target: TargetConf = field(default_factory=TargetConf)  # its tokenizer alone
    documents: int = 6  # shown, of all categories in turn; with `packed` so many rows
    packed: bool = False  # rows of data.length as training packs what was read
    read: int | None = 1000  # documents that they are drawn from; null = all
    tokens: int = 300  # of a document in the terminal; of longer runs the middle is left out
    boundaries: bool = False  # of tokens, in the terminal; the page can always show them
    seed: int = 0  # of the drawing
    run_name: str = "show"
    output_dir: str = "outputs/show"

    def __post_init__(self) -> None:
        for name in ("documents", "read", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, got {value}")
        if self.data.source is Source.captured:
            raise UserError(
                "data.source: data.show reads rows, got captured; show what the store was "
                "captured from"
            )
        if self.data.source is Source.demo and self.data.answers.by is Author.target:
            raise UserError(
                "data.answers.by: data.show generates nothing, got target; take corpus, or show "
                "what `python -m data.prepare` wrote: data=prepared data.path=outputs/prepare/demo"
            )


@entry_point("show", ShowConf)
def main(conf: ShowConf) -> None:
    speak()
    check(conf.data)
    folder = Path(conf.output_dir) / conf.run_name
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = conf.target.source.tokenizer()
    skipped: Counter[str] = Counter()
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    found = tallied(islice(documents(conf, tokenizer, skipped), conf.read), tallies)
    if conf.packed:
        read = Documents.of(found)
        refuse_bad(tallies, skipped)
        looks = list(some_rows(read, conf.data, conf.documents, tokenizer, seed=conf.seed))
    else:
        looks = some_documents(found, conf.documents, tokenizer, seed=conf.seed)
    written = page(source(conf), conf.target.name, looks, tallies, skipped)
    path = folder / "sample.html"
    with writing(folder), atomic_path(path) as partial:
        partial.write_text(written)
    for look in looks:
        say(look, conf)
    sum_up(tallies, skipped)
    log.info("the same as a page: %s", path)
    refuse_bad(tallies, skipped)  # after it was shown


def tallied(found: Iterable[Tokenised], tallies: dict[str, Tally]) -> Iterator[Tokenised]:
    """The documents as they are, each counted."""
    for document in found:
        tallies[document.category].add(document)
        yield document


def documents(
    conf: ShowConf, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]
) -> Iterator[Tokenised]:
    """Of the data; the demo's prompts go on as their texts do."""
    if conf.data.source is not Source.demo:
        yield from unchecked(conf.data, tokenizer, skipped)
        return
    wanted = conf.data.answers
    for prompt in training_prompts(wanted.prompts, seed=conf.seed):
        ids, rest = tokenizer([prompt.text, prompt.rest])["input_ids"]
        document = from_pair(ids, rest[: wanted.max_new_tokens])
        yield replace(document, category=prompt.category)


def source(conf: ShowConf) -> str:
    """What the data is called."""
    return conf.data.path or "the demo's prompts, as their texts go on"


def say(look: Look, conf: ShowConf) -> None:
    """One document in colour; between marks where there is none."""
    some = shortened(look.pieces, conf.tokens)
    if CONSOLE.color_system:
        CONSOLE.rule(Text(look.name, style="bold"), align="left", style="dim")
        CONSOLE.print(Text(look.about, style="dim"))
        CONSOLE.print(in_colour(some, boundaries=conf.boundaries), end="\n\n")
    else:
        CONSOLE.print(f"--- {look.name}, {look.about}", **PLAIN)
        CONSOLE.print(in_plain(some, boundaries=conf.boundaries), **PLAIN)


def sum_up(tallies: dict[str, Tally], skipped: Counter[str]) -> None:
    """What the marks mean, the masks of each category, and what was left out."""
    if CONSOLE.color_system:
        CONSOLE.print(legend(), end="\n\n")
    columns, *rows = table(tallies)
    say_table(columns, rows)
    for reason, count in skipped.most_common():
        CONSOLE.print(f"{count:,} left out: {visible(reason)}", **PLAIN)


if __name__ == "__main__":
    main()
