"""Readable views of documents: a sample, token by token, with answers marked.

Characters that cannot be printed are escaped: the text of a data set must neither control the terminal nor hide in it.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby, islice, zip_longest
from operator import itemgetter
from typing import NamedTuple

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.chat.mask_check import MaskStats
from data.chat.template import find_added_tokens
from data.chat.text_stream import split_text
from data.sources.rows import TokenizedDocument

NEWLINE_MARK = "\u21b5"  # in front of every line break, which an answer may begin or end with
INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
ANSWER_OPEN, ANSWER_CLOSE = "\u00ab", "\u00bb"  # around answers if there is no color
MIN_RUN_TOKENS = 16  # tokens of a run that are always shown
SHARE_COLUMN = "supervised"
# Answers are not underlined: underscores would be invisible.
ANSWER_STYLE, SPECIAL_STYLE, LEFT_OUT_STYLE = "bold green", "magenta", "dim italic"


class TokenSpan(NamedTuple):
    """One token, the tokens of one character, or a placeholder for omitted tokens."""

    text: str
    ids: tuple[int, ...]
    answer: bool
    special: bool = False
    left_out: bool = False


class DocumentView(NamedTuple):
    """A document with its heading, ready to be rendered."""

    name: str
    description: str
    spans: list[TokenSpan]


def split_into_spans(tokenizer: PreTrainedTokenizerBase, document: TokenizedDocument) -> Iterator[TokenSpan]:
    """Split the document's text by tokens, keeping the tokens of a character together."""
    special = set(find_added_tokens(tokenizer).values())
    end = 0
    for num_tokens, text in split_text(tokenizer, document.ids):
        begin, end = end, end + num_tokens
        # A mask that changes within a character is shown: its text then stands with its last part.
        for answer, run in groupby(range(begin, end), key=document.answer.__getitem__):
            ids = tuple(document.ids[number] for number in run)
            shown = text if begin + len(ids) == end else INCOMPLETE_CHARACTER
            begin += len(ids)
            yield TokenSpan(escape_unprintable(shown), ids, answer, ids[-1] in special)


def escape_unprintable(text: str) -> str:
    """Escape characters that cannot be printed and put a mark in front of each line break."""
    escaped = (c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped).replace("\n", NEWLINE_MARK + "\n")


def shorten_spans(spans: list[TokenSpan], limit: int) -> list[TokenSpan]:
    """Return about `limit` spans, without the middle of long prompts and answers."""
    runs = [(answer, list(run)) for answer, run in groupby(spans, key=lambda span: span.answer)]
    half = max(MIN_RUN_TOKENS, limit // max(len(runs), 1)) // 2
    shortened = []
    for answer, run in runs:
        middle = run[half:-half]
        if len(spans) > limit and len(middle) > 1:
            text = f"[... {sum(len(span.ids) for span in middle):,} tokens ...]"
            run[half:-half] = [TokenSpan(text, (), answer, left_out=True)]
        shortened += run
    return shortened


def render_color(spans: list[TokenSpan]) -> Text:
    """Render spans for a terminal: answers bold green, special tokens magenta, line breaks dim."""
    text = Text()
    for span in spans:
        styles = [ANSWER_STYLE] * span.answer + [SPECIAL_STYLE] * span.special
        style = LEFT_OUT_STYLE if span.left_out else " ".join(styles)
        text.append(span.text, style=style or "none")
    text.highlight_regex(NEWLINE_MARK, style="dim")
    return text


def render_legend() -> Text:
    """Render the legend of the colors."""
    return Text.assemble(
        ("answers", ANSWER_STYLE),
        ", trained on; prompts; ",
        ("special tokens", SPECIAL_STYLE),
        f"; {NEWLINE_MARK} line breaks",
    )


def render_plain(spans: list[TokenSpan]) -> str:
    """Return the text of spans, with answers between quotation marks."""
    text = ""
    for answer, run in groupby(spans, key=lambda span: span.answer):
        part = "".join(span.text for span in run)
        text += f"{ANSWER_OPEN}{part}{ANSWER_CLOSE}" if answer else part
    return text


def describe_document(document: TokenizedDocument) -> str:
    """Return one line on a document: its labels, tokens, supervised share and answers."""
    supervised = sum(document.answer)
    answers = sum(answer for answer, _ in groupby(document.answer))
    labels = filter(None, (document.category, document.language))
    return ", ".join(
        [
            *map(escape_unprintable, labels),
            f"{len(document.ids):,} tokens",
            f"{supervised:,} supervised ({supervised / max(len(document.ids), 1):.1%})",
            f"{answers} answer{'s' * (answers != 1)}",
        ]
    )


def build_mask_table(stats_by_category: Mapping[str, MaskStats]) -> list[list[str]]:
    """Return a table of mask statistics by category: a header, rows and, if several, a total."""
    rows = dict(sorted(stats_by_category.items()))
    if len(rows) > 1:
        rows["all"] = sum(stats_by_category.values(), start=MaskStats())
    return [["category", "documents", "tokens", SHARE_COLUMN, "no answer", "no prompt"]] + [
        [
            escape_unprintable(name) or "-",
            f"{stats.documents:,}",
            f"{stats.tokens:,}",
            f"{stats.answer_tokens / max(stats.tokens, 1):.1%}",
            f"{stats.without_answers:,}",
            f"{stats.without_prompt:,}",
        ]
        for name, stats in rows.items()
    ]


def sample_documents(
    documents: Iterable[TokenizedDocument], count: int, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> list[DocumentView]:
    """Sample documents from the categories in turn, uniformly within each category."""
    by_category: defaultdict[str, list[tuple[int, TokenizedDocument]]] = defaultdict(list)
    for number, document in enumerate(documents):
        by_category[document.category].append((number, document))
    rng = random.Random(seed)
    shuffled = [rng.sample(members, len(members)) for members in by_category.values()]
    in_turn = filter(None, chain.from_iterable(zip_longest(*shuffled)))
    return [
        DocumentView(f"document {number:,}", describe_document(document), list(split_into_spans(tokenizer, document)))
        for number, document in sorted(islice(in_turn, count), key=itemgetter(0))
    ]
