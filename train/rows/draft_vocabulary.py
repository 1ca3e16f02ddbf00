"""Choice of a reduced draft vocabulary, and its coverage of the answers."""

import logging
from pathlib import Path

from data.config import DataConf
from data.packing.documents import Packed
from data.vocabulary.counts import (
    build_coverage_table,
    count_training_tokens,
    render_markdown_table,
    sizes_around,
)
from models.console import print_table
from models.drafts.base import Draft
from models.speculate.draft_vocab import required_token_ids
from models.target.target import Target
from train.run_dir import refuse_full_disk

log = logging.getLogger(__name__)
VOCABULARY_FILE = "vocabulary.md"  # in a run folder; the checkpoint alone lists the tokens


def choose_vocabulary(
    draft: Draft, target: Target, rows: Packed, conf: DataConf, folder: Path | None
) -> None:
    """Count the tokens of the answers, let the draft choose its own, and print their coverage.

    Vocabularies of about half and double the size are printed for comparison. Documents that are
    held out of the rows are not counted.

    `folder`: where the table is written too; None in processes that print and write nothing.
    """
    is_reduced = draft.kept_ids is not None
    counts = count_training_tokens(
        conf, rows.documents, rows.document_numbers, target.vocab_size,
        target.tokenizer if is_reduced else None, target.tokenizer_fingerprint,
    )  # fmt: skip
    required_ids = required_token_ids(target.tokenizer)
    figures = draft.prepare(counts.total, target=target, required_ids=required_ids)
    for name, value in figures.items():
        log.info("draft: %s %.4g", name, value)
    if draft.kept_ids is not None and folder is not None:
        sizes = sizes_around(len(draft.kept_ids), len(required_ids), target.vocab_size)
        coverage = build_coverage_table(counts, sizes, required_ids)
        print_table(coverage[0], coverage[1:])
        with refuse_full_disk(folder):
            (folder / VOCABULARY_FILE).write_text(render_markdown_table(coverage))
