"""Token counts of the answers by category and language, and coverage by draft vocabularies."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.sources.rows import TokenizedDocument
from data.vocabulary.draft_vocab import choose_kept_ids, token_coverage

UNNAMED_CATEGORY = "unnamed"  # category of documents without a category
UNKNOWN_LANGUAGE = "und"  # ISO 639-3 for undetermined: code, numbers, a word or two
LANGUAGE_SAMPLE_TOKENS = 128  # first tokens of a document's answers, to detect its language
LANGUAGE_SAMPLE_CHARS = 400  # leading characters of a text that are classified
MIN_LANGUAGE_PROBABILITY = 0.5  # a less probable language counts as undetermined
MAX_TABLE_GROUPS = 12  # largest groups of a kind that a table lists


@dataclass(kw_only=True)
class TokenCounts:
    """Counts of answer tokens; each token counts once in a category and once in a language."""

    categories: dict[str, Int[np.ndarray, " vocab"]]
    languages: dict[str, Int[np.ndarray, " vocab"]]

    @property
    def total(self) -> Int[Tensor, " vocab"]:
        """Return the counts over all documents."""
        return torch.from_numpy(np.sum(list(self.categories.values()), axis=0))

    @property
    def groups(self) -> dict[str, Int[Tensor, " vocab"]]:
        """Return the total counts, then those of each category and language, largest first, the smallest in one."""
        groups = {"all": self.total}
        for kind, counts in (("category", self.categories), ("language", self.languages)):
            largest = sorted(counts.items(), key=lambda group: -group[1].sum())
            for name, token_counts in largest[:MAX_TABLE_GROUPS]:
                groups[f"{kind} {name}"] = torch.from_numpy(token_counts)
            if rest := [token_counts for _, token_counts in largest[MAX_TABLE_GROUPS:]]:
                groups[f"{kind}: {len(rest)} others"] = torch.from_numpy(np.sum(rest, axis=0))
        return groups


def count_answer_tokens(
    documents: Iterable[TokenizedDocument], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> TokenCounts:
    """Count the answer tokens of the documents, whose ids are below `vocab_size`.

    The language of an unlabeled document is detected from its answers; without a tokenizer it is undetermined.
    """
    categories: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(vocab_size, np.int64))
    languages: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(vocab_size, np.int64))
    for document in documents:
        if not any(document.answer):
            continue
        answer_ids = np.asarray(document.ids)[np.asarray(document.answer)]
        language = document.language or UNKNOWN_LANGUAGE
        if tokenizer is not None and not document.language:
            language = detect_language(
                str(tokenizer.decode(answer_ids[:LANGUAGE_SAMPLE_TOKENS], skip_special_tokens=True))
            )
        np.add.at(categories[document.category or UNNAMED_CATEGORY], answer_ids, 1)
        np.add.at(languages[language], answer_ids, 1)
    return TokenCounts(categories=dict(categories), languages=dict(languages))


def detect_language(text: str) -> str:
    """Return the ISO 639-1 code of the likeliest language, or `und` if no language is likely.

    >>> detect_language("Wer zuletzt lacht, lacht am besten."), detect_language("x = [1, 2]")
    ('de', 'und')
    """
    language, _ = _load_language_identifier().classify(text[:LANGUAGE_SAMPLE_CHARS])
    return UNKNOWN_LANGUAGE if language == "zxx" else language  # zxx: no linguistic content


@cache
def _load_language_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # loads a model: 0.5 s

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=MIN_LANGUAGE_PROBABILITY)


def sizes_around(size: int, min_size: int, max_size: int) -> list[int]:
    """Return half the size, the size and its double, as far as they lie within the bounds."""
    return [n for n in (size // 2, size, 2 * size) if min_size <= n <= max_size]


def build_coverage_table(counts: TokenCounts, sizes: list[int], required_ids: list[int]) -> list[list[str]]:
    """Return each group's share of answer tokens that a draft vocabulary of each size covers, below a heading."""
    vocabularies = [choose_kept_ids(counts.total, size, required_ids) for size in sizes]
    return [["answer tokens", "count", *(f"{size:,} kept" for size in sizes)]] + [
        [name, f"{int(group.sum()):,}", *(f"{token_coverage(group, ids):.2%}" for ids in vocabularies)]
        for name, group in counts.groups.items()
    ]
