"""Count masks by category and reject, early, those that supervise nothing or the prompts too.

Both result from a wrong chat template or wrong answer flags, and neither raises an error in training.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from data.sources.rows import TokenizedDocument
from models.io.errors import require

EARLY_CHECK_DOCUMENTS = 1000  # documents of a category after which its masks are first checked
MASK_HINT = "look at them with `python -m data.show`; check the chat template or the answer flags"


@dataclass(kw_only=True)
class MaskStats:
    """Counts of the documents and masks of one category."""

    documents: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    without_answers: int = 0  # documents without an answer token
    without_prompt: int = 0  # documents of answer tokens only

    def add(self, document: TokenizedDocument) -> None:
        answer_tokens = sum(document.answer)
        self.documents += 1
        self.tokens += len(document.ids)
        self.answer_tokens += answer_tokens
        self.without_answers += not answer_tokens
        self.without_prompt += bool(answer_tokens) and answer_tokens == len(document.ids)

    def __add__(self, other: "MaskStats") -> "MaskStats":
        return MaskStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(MaskStats)})

    def check(self, category: str) -> None:
        """Raise UserError if every document lacks an answer token, or every one lacks a prompt."""
        of_category = f" of category {category!r}" if category else ""
        require(
            self.without_answers < self.documents,
            f"data: documents{of_category} must hold answer tokens, got none in {self.documents:,}; {MASK_HINT}",
        )
        require(
            self.without_prompt < self.documents,
            f"data: documents{of_category} must hold prompts too, got only answers in {self.documents:,}; {MASK_HINT}",
        )


def track_mask_stats(
    documents: Iterable[TokenizedDocument], stats: defaultdict[str, MaskStats]
) -> Iterator[TokenizedDocument]:
    """Yield the documents unchanged and count each in the stats of its category."""
    for document in documents:
        stats[document.category].add(document)
        yield document


def check_documents(documents: Iterable[TokenizedDocument], skipped: Counter[str]) -> Iterator[TokenizedDocument]:
    """Yield the documents unchanged; raise UserError if a category's masks are all wrong."""
    stats: defaultdict[str, MaskStats] = defaultdict(MaskStats)
    for document in track_mask_stats(documents, stats):
        if stats[document.category].documents == EARLY_CHECK_DOCUMENTS:
            stats[document.category].check(document.category)
        yield document
    check_mask_stats(stats, skipped)


def check_mask_stats(stats: Mapping[str, MaskStats], skipped: Counter[str]) -> None:
    """Raise UserError if a category's masks are all wrong, or, with the reasons in `skipped`, without documents."""
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.most_common(3))
    require(
        bool(stats),
        f"data: must hold a document, got none ({reasons or 'no rows'}); check data.path and the chat template",
    )
    for category, category_stats in stats.items():
        category_stats.check(category)
