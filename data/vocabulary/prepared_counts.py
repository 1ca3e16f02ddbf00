"""How often a prepared folder's answers use each token: counted once, for every draft of it."""

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.config import Turns
from data.progress import Progress
from data.sources.prepared_rows import learned, read
from data.sources.row_formats import Tokenised
from data.vocabulary.counts import FILE, TokenCounts, count, markdown, save, sizes_below, table
from models.checkpoint import tokenizer_fingerprint
from models.speculate.draft_vocab import always_kept


def keep_counts(folder: Path, tokenizer: PreTrainedTokenizerBase, own: Path) -> str:
    """Leave them in the folder; a section of its report. Empty where the target gave no answer.

    Written in `own` first, as another worker may be about to do the same.
    """
    most = max(tokenizer.get_vocab().values()) + 1
    counts = count(_answered(folder), most, tokenizer)
    if not counts.categories:
        return ""
    save(counts, own / FILE, tokenizer_fingerprint(tokenizer))
    (own / FILE).replace(folder / FILE)
    return section(counts, most, tokenizer)


def section(counts: TokenCounts, most: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """What draft vocabularies of some sizes would have of the answers."""
    always = always_kept(tokenizer)
    sizes = sizes_below(len(always), most)
    covered = markdown(table(counts, sizes, always))
    return f"\nOf {most:,} tokens, the most frequent cover:\n\n{covered}"


def _answered(folder: Path) -> Iterator[Tokenised]:
    """Documents that the target answered, token by token."""
    with Progress("tokens", total=None) as progress:
        for row in read(folder):
            if row.documents:
                for piece in learned(row, Turns.all):
                    assert isinstance(piece, Tokenised)
                    yield piece
            progress.count(done=1)
