"""Token counts of a prepared folder's answers, taken once for all drafts trained on it."""

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.config import TurnSelection
from data.progress import RowProgress
from data.sources.prepared_rows import parse_prepared_row, read_prepared_rows
from data.sources.row_formats import TokenizedDocument
from data.vocabulary.counts import (
    TOKEN_COUNTS_FILE,
    TokenCounts,
    build_coverage_table,
    count_answer_tokens,
    render_markdown_table,
    save_token_counts,
    sizes_below,
)
from models.checkpoint import tokenizer_fingerprint
from models.speculate.draft_vocab import required_token_ids


def write_token_counts(folder: Path, tokenizer: PreTrainedTokenizerBase, worker_dir: Path) -> str:
    """Write the counts to the folder and return the coverage section of its report.

    The section is empty, and no file is written, if the target gave no answers. The file is
    written in `worker_dir` first because another worker may write the same file concurrently.
    """
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    counts = count_answer_tokens(_iter_answered_documents(folder), vocab_size, tokenizer)
    if not counts.categories:
        return ""
    save_token_counts(counts, worker_dir / TOKEN_COUNTS_FILE, tokenizer_fingerprint(tokenizer))
    (worker_dir / TOKEN_COUNTS_FILE).replace(folder / TOKEN_COUNTS_FILE)
    return render_coverage_section(counts, vocab_size, tokenizer)


def render_coverage_section(
    counts: TokenCounts, vocab_size: int, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Render the shares of the answers that draft vocabularies of several sizes cover."""
    required_ids = required_token_ids(tokenizer)
    sizes = sizes_below(len(required_ids), vocab_size)
    table = render_markdown_table(build_coverage_table(counts, sizes, required_ids))
    return f"\nOf {vocab_size:,} tokens, the most frequent cover:\n\n{table}"


def _iter_answered_documents(folder: Path) -> Iterator[TokenizedDocument]:
    """Yield the recorded documents of the rows that the target answered."""
    with RowProgress("tokens", total=None) as progress:
        for row in read_prepared_rows(folder):
            if row.documents:
                for document in parse_prepared_row(row, TurnSelection.all):
                    assert isinstance(document, TokenizedDocument)
                    yield document
            progress.count(done=1)
