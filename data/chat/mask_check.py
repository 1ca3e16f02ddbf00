"""Masks that would train nothing, or the prompts as well: counted by category, refused early.

Both come of a wrong chat template or wrong answer flags, and both would train without a complaint.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from data.sources.row_formats import Tokenised
from models.errors import UserError

EARLY = 1000  # documents of one kind are enough to tell
LOOK = "look at them with `python -m data.show`; check the chat template or the answer flags"


@dataclass(kw_only=True)
class Tally:
    """What one category's masks are like."""

    documents: int = 0
    tokens: int = 0
    learned: int = 0  # answer tokens
    silent: int = 0  # documents without any
    only_answers: int = 0  # documents without a prompt

    def add(self, document: Tokenised) -> None:
        learned = sum(document.answer)
        self.documents += 1
        self.tokens += len(document.ids)
        self.learned += learned
        self.silent += not learned
        self.only_answers += bool(learned) and learned == len(document.ids)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)}
        )

    def refuse(self, category: str) -> None:
        """Raise UserError where every document is masked wrongly."""
        where = f" of category {category!r}" if category else ""
        if self.documents and self.silent == self.documents:
            raise UserError(
                f"data: documents{where} must hold answer tokens, got none in "
                f"{self.documents:,}; {LOOK}"
            )
        if self.documents and self.only_answers == self.documents:
            raise UserError(
                f"data: documents{where} must hold prompts too, got only answer tokens in "
                f"{self.documents:,}; {LOOK}"
            )


def checked(found: Iterable[Tokenised], skipped: Counter[str]) -> Iterator[Tokenised]:
    """The documents as they are. Raises UserError where a category's masks are all wrong."""
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    for document in found:
        tally = tallies[document.category]
        tally.add(document)
        if tally.documents == EARLY:
            tally.refuse(document.category)
        yield document
    refuse_bad(tallies, skipped)


def refuse_bad(tallies: Mapping[str, Tally], skipped: Counter[str]) -> None:
    """Raise UserError where there is no document, or a category's masks are all wrong."""
    if not tallies:
        reasons = ", ".join(f"{why}: {count}" for why, count in skipped.most_common(3))
        raise UserError(
            f"data: must hold a document, got none ({reasons or 'no rows'}); "
            "check data.path, data.limit and the chat template"
        )
    for category, tally in tallies.items():
        tally.refuse(category)
