"""Which tokens the answers use, by category and by language, and what a draft vocabulary covers.

    documents -> counts of answer tokens -> the N most frequent -> shares of each group's tokens
                                            (models/speculate/draft_vocab.py)

Token ids are all that this takes: the target need not read the documents.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.config import DataConf, Turns
from data.packing.documents import Documents
from data.sources.row_formats import Tokenised
from data.vocabulary.languages import UNKNOWN, language_of
from models.checkpoint import TOKENIZER_HASH, atomic_path
from models.errors import UserError
from models.speculate.draft_vocab import choose, coverage

FILE = "token_counts.safetensors"  # of a prepared folder
UNNAMED = "unnamed"  # category of documents that do not say one
READ = 128  # tokens of a document's answers that its language is told by
SHOWN = 12  # groups of a kind that a table has


@dataclass(kw_only=True)
class TokenCounts:
    """Of answer tokens. Each counts once, in its document's category and in its language."""

    categories: dict[str, Int[np.ndarray, " vocab"]]
    languages: dict[str, Int[np.ndarray, " vocab"]]

    @property
    def total(self) -> Int[Tensor, " vocab"]:
        return torch.from_numpy(np.sum(list(self.categories.values()), axis=0))

    @property
    def groups(self) -> dict[str, Int[Tensor, " vocab"]]:
        """All, then each category and each language, the largest first."""
        groups = {"all": self.total}
        for kind, counts in (("category", self.categories), ("language", self.languages)):
            largest = sorted(counts.items(), key=lambda group: -group[1].sum())
            for name, found in largest[:SHOWN]:
                groups[f"{kind} {name}"] = torch.from_numpy(found)
            if rest := [found for _, found in largest[SHOWN:]]:
                groups[f"{kind}: {len(rest)} others"] = torch.from_numpy(np.sum(rest, axis=0))
        return groups

    def without(self, others: "TokenCounts") -> "TokenCounts":
        """Subtract the counts of some of these documents."""
        return TokenCounts(
            categories=_difference(self.categories, others.categories),
            languages=_difference(self.languages, others.languages),
        )


def _difference(
    counts: dict[str, np.ndarray], others: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    left = ((name, tokens - others.get(name, 0)) for name, tokens in counts.items())
    return {name: tokens for name, tokens in left if tokens.any()}


def count(
    pieces: Iterable[Tokenised], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> TokenCounts:
    """Count them all. Where a document does not say its language, its answer is looked at.

    Without a tokenizer that language stays undetermined.
    """
    categories: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(vocab_size, np.int64))
    languages: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(vocab_size, np.int64))
    for piece in pieces:
        if not any(piece.answer):
            continue
        ids = np.asarray(piece.ids)
        if (largest := ids.max()) >= vocab_size:
            raise UserError(
                f"data: token ids must be below the target's vocabulary of {vocab_size}, "
                f"got {largest}; tokenise with the target's own tokenizer"
            )
        answer = ids[np.asarray(piece.answer)]
        np.add.at(categories[piece.category or UNNAMED], answer, 1)
        np.add.at(languages[piece.language or _language(answer, tokenizer)], answer, 1)
    return TokenCounts(categories=dict(categories), languages=dict(languages))


def _language(ids: Int[np.ndarray, " answer"], tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None:
        return UNKNOWN
    return language_of(str(tokenizer.decode(ids[:READ], skip_special_tokens=True)))


def counts_of(
    conf: DataConf, documents: Documents, learned: Int[np.ndarray, " learned"], vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None, tokenizer_hash: str,
) -> TokenCounts:  # fmt: skip
    """Count the answer tokens of the learned documents, which are given by their numbers.

    Counts that were kept with the data are taken where they are of all these documents; those of
    documents that are held back are subtracted from them.
    """
    if conf.path is not None and conf.limit is None and conf.turns is not Turns.last:
        kept = load(Path(conf.path) / FILE, vocab_size, tokenizer_hash)
        if kept is not None:
            others = np.setdiff1d(np.arange(len(documents)), learned).tolist()
            held_back = (documents[number] for number in others)
            return kept.without(count(held_back, vocab_size, tokenizer))
    return count((documents[number] for number in learned.tolist()), vocab_size, tokenizer)


def save(counts: TokenCounts, file: Path, tokenizer_hash: str) -> None:
    """One row of counts a category and a language; their names stand in the metadata."""
    kinds = {"categories": counts.categories, "languages": counts.languages}
    metadata = {kind: json.dumps(list(groups)) for kind, groups in kinds.items()}
    tensors = {kind: np.stack(list(groups.values())) for kind, groups in kinds.items()}
    metadata[TOKENIZER_HASH] = tokenizer_hash
    with atomic_path(file) as partial:
        partial.write_bytes(safetensors.numpy.save(tensors, metadata=metadata))


def load(file: Path, vocab_size: int, tokenizer_hash: str) -> TokenCounts | None:
    """What `save` wrote; None where there is nothing, or nothing of this tokenizer."""
    if not file.exists():
        return None
    with safetensors.safe_open(file, "numpy") as tensors:
        metadata = tensors.metadata()
        names = {kind: json.loads(metadata[kind]) for kind in ("categories", "languages")}
        counts = {kind: tensors.get_tensor(kind) for kind in names}
    if metadata[TOKENIZER_HASH] != tokenizer_hash:
        return None
    wider = max(0, vocab_size - counts["categories"].shape[1])  # heads have rows to spare
    fitted = {
        kind: np.pad(rows[:, :vocab_size], ((0, 0), (0, wider))) for kind, rows in counts.items()
    }
    return TokenCounts(
        **{kind: dict(zip(names[kind], rows, strict=True)) for kind, rows in fitted.items()}
    )


def sizes_around(size: int, least: int, most: int) -> list[int]:
    """Half of it, itself and its double, as far as they can be."""
    return [one for one in (size // 2, size, 2 * size) if least <= one <= most]


def sizes_below(least: int, most: int) -> list[int]:
    """Powers of two to choose from, five at the most.

    >>> sizes_below(300, 4096)
    [512, 1024, 2048]
    """
    return [2**power for power in range(63) if least <= 2**power < most][-5:]


def covered(counts: TokenCounts, sizes: list[int], always: list[int]) -> dict[str, list[float]]:
    """By group: the share of its answer tokens that a draft vocabulary of each size has."""
    total = counts.total
    kept = [choose(total, size, always) for size in sizes]
    return {name: [coverage(group, ids) for ids in kept] for name, group in counts.groups.items()}


def table(counts: TokenCounts, sizes: list[int], always: list[int]) -> list[list[str]]:
    """The same in cells, with a heading."""
    groups = counts.groups
    return [["answer tokens", "count", *(f"{size:,} kept" for size in sizes)]] + [
        [name, f"{int(groups[name].sum()):,}", *(f"{share:.2%}" for share in shares)]
        for name, shares in covered(counts, sizes, always).items()
    ]


def markdown(rows: list[list[str]]) -> str:
    """The first column is words, the others are figures."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (rows[0], rule, *rows[1:])]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)
