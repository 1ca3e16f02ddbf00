"""A document as people look at it: its text token by token, and what stands out in it.

What cannot be printed is written out: text of a data set must not steer a terminal, nor hide.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.chat.mask_check import Tally
from data.chat.template import markers
from data.sources.row_formats import Tokenised

NEWLINE = "\u21b5"  # in front of every line break, which an answer may begin or end with
OPEN, CLOSE = "\u00ab", "\u00bb"  # around answers, where there is no colour
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MOST_BYTES = 8  # tokens that one character may take
LEAST = 16  # tokens of a run that are shown, however many runs there are
SHARE = "supervised"
COLUMNS = ["category", "documents", "tokens", SHARE, "no answer", "no prompt"]
ANSWER, SPECIAL, LEFT_OUT = "bold green", "magenta", "dim italic"  # underlined, _ would be lost


class Shown(NamedTuple):
    """One token, or the few that make a character, or what is left out of a long run."""

    text: str
    ids: tuple[int, ...]
    answer: bool
    special: bool = False
    left_out: bool = False


class Look(NamedTuple):
    """A document to be looked at."""

    name: str
    about: str
    pieces: list[Shown]


def shown(tokenizer: PreTrainedTokenizerBase, document: Tokenised) -> Iterator[Shown]:
    """The document's text in pieces that none of its characters is torn by."""
    special = set(markers(tokenizer).values())
    before: list[int] = []
    group: list[int] = []
    for place, (token, answer) in enumerate(zip(document.ids, document.answer, strict=True), 1):
        group.append(token)
        known, text = (str(tokenizer.decode(ids)) for ids in (before, before + group))
        text = text[len(known) :]
        ends = place == len(document.ids) or document.answer[place] != answer
        if text.endswith(UNFINISHED) and len(group) < MOST_BYTES and not ends:
            continue
        yield Shown(visible(text), tuple(group), answer, special=token in special)
        before, group = group, []


def visible(text: str) -> str:
    """Line breaks stay, with a sign in front of them; what cannot be printed is escaped."""
    return "".join(
        NEWLINE + "\n" if c == "\n" else c if c.isprintable() or c == "\t" else escape(c)
        for c in text
    )


def escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def shortened(pieces: list[Shown], most: int) -> list[Shown]:
    """About `most` pieces: of long runs of prompt or answer the middle is left out."""
    runs = [(answer, list(run)) for answer, run in groupby(pieces, key=lambda piece: piece.answer)]
    half = max(LEAST, most // max(len(runs), 1)) // 2
    kept = []
    for answer, run in runs:
        middle = run[half:-half]
        if len(pieces) > most and len(middle) > 1:
            count = sum(len(piece.ids) for piece in middle)
            gap = Shown(f"[... {count:,} tokens ...]", (), answer, left_out=True)
            run = [*run[:half], gap, *run[-half:]]
        kept += run
    return kept


def in_colour(pieces: list[Shown], *, boundaries: bool) -> Text:
    """For a terminal: answers bold and green, special tokens magenta, line breaks faint."""
    text = Text()
    for place, piece in enumerate(pieces):
        if boundaries and place:
            text.append("|", style="dim")
        text.append(piece.text, style=style(piece))
    text.highlight_regex(NEWLINE, style="dim")
    return text


def legend() -> Text:
    """What the colours say."""
    return Text.assemble(
        ("what the target said", ANSWER), ", learned; what it was shown; ",
        ("special tokens", SPECIAL), f"; {NEWLINE} a line break",
    )  # fmt: skip


def style(piece: Shown) -> str:
    if piece.left_out:
        return LEFT_OUT
    styles = [ANSWER] * piece.answer + [SPECIAL] * piece.special
    return " ".join(styles) or "none"


def in_plain(pieces: list[Shown], *, boundaries: bool) -> str:
    """For a file: answers stand between quotes."""
    runs = groupby(pieces, key=lambda piece: piece.answer)
    between = "|" if boundaries else ""
    texts = [(answer, between.join(piece.text for piece in run)) for answer, run in runs]
    return "".join(f"{OPEN}{text}{CLOSE}" if answer else text for answer, text in texts)


def about(document: Tokenised) -> str:
    """What a document is, in a line."""
    learned = sum(document.answer)
    runs = sum(answer for answer, _ in groupby(document.answer))
    labels = [visible(label) for label in (document.category, document.language) if label]
    tokens = f"{len(document.ids):,} tokens"
    share = f"{learned:,} supervised ({learned / max(len(document.ids), 1):.1%})"
    return ", ".join([*labels, tokens, share, f"{runs} answer{'s' * (runs != 1)}"])


def table(tallies: Mapping[str, Tally]) -> list[list[str]]:
    """What the masks of each category are like, with a heading; all together where several."""
    rows = dict(sorted(tallies.items()))
    if len(rows) > 1:
        rows["all"] = sum(tallies.values(), start=Tally())
    return [COLUMNS] + [
        [
            visible(name) or "-",
            f"{tally.documents:,}",
            f"{tally.tokens:,}",
            f"{tally.learned / max(tally.tokens, 1):.1%}",
            f"{tally.silent:,}",
            f"{tally.only_answers:,}",
        ]
        for name, tally in rows.items()
    ]
