"""Which tokens a draft with a reduced vocabulary keeps, and what they cover of the answers."""

import logging
from pathlib import Path

from data.config import DataConf
from data.packing.documents import Packed
from data.vocabulary.counts import counts_of, markdown, sizes_around, table
from models.console import say_table
from models.drafts.base import Draft
from models.speculate.draft_vocab import always_kept
from models.target.target import Target
from train.run_dir import refuse_full_disk

log = logging.getLogger(__name__)
PAGE = "vocabulary.md"  # of a run folder; which tokens they are stands in the checkpoint alone


def choose_vocabulary(
    draft: Draft, target: Target, rows: Packed, conf: DataConf, folder: Path | None
) -> None:
    """Count the learned answers' tokens, let the draft choose, and print what it covers.

    Half the size and double the size are printed beside it. Documents that are held back from the
    rows are not counted.

    `folder`: where that is kept too; None in processes that say and write nothing.
    """
    reduced = draft.kept_ids is not None
    counts = counts_of(
        conf, rows.documents, rows.document_numbers, target.vocab_size,
        target.tokenizer if reduced else None, target.tokenizer_fingerprint,
    )  # fmt: skip
    always = always_kept(target.tokenizer)
    figures = draft.prepare(counts.total, target=target, always=always)
    for name, value in figures.items():
        log.info("draft: %s %.4g", name, value)
    if draft.kept_ids is not None and folder is not None:
        sizes = sizes_around(len(draft.kept_ids), len(always), target.vocab_size)
        shares = table(counts, sizes, always)
        say_table(shares[0], shares[1:])
        with refuse_full_disk(folder):
            (folder / PAGE).write_text(markdown(shares))
