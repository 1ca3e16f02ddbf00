"""Compute from the packed rows the hashes of their prompts and the draft's reduced vocabulary."""

import logging
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.eval_prompts.contamination import PROMPT_HASHES_FILE
from data.packing.documents import Packed
from data.packing.pack import DOCUMENT
from data.sources.rows import TokenizedDocument
from data.sources.text_hashes import ANSWER_START_CHARS, prompt_hashes
from data.vocabulary.counts import build_coverage_table, count_answer_tokens, sizes_around
from data.vocabulary.draft_vocab import choose_kept_ids, required_token_ids, token_coverage
from models.drafts.base import Draft
from models.io.console import print_table
from models.io.files import atomic_path
from models.io.pages import render_markdown_table
from models.targets.target import Target

log = logging.getLogger(__name__)
VOCABULARY_FILE = "vocabulary.md"  # in a run folder; only the checkpoint lists the tokens
# Enough for the beginning of an answer: a character has at most 4 bytes, a token at least one.
MAX_START_TOKENS = 4 * ANSWER_START_CHARS


def write_prompt_hashes(rows: Packed, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the hashes of all prompts and answer starts in the rows to the run folder."""
    hashes = {
        prompt_hash
        for number in np.unique(rows.table[:, DOCUMENT]).tolist()
        for prompt_hash in _hash_document(rows.documents[number], tokenizer)
    }
    with atomic_path(folder / PROMPT_HASHES_FILE) as partial, partial.open("wb") as stream:
        np.save(stream, np.array(sorted(hashes), np.uint64))


def _hash_document(document: TokenizedDocument, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the hashes of the first question, the text before the first answer, and its beginning.

    A document with at most one token before its answer is a plain text, of which only the beginning is hashed.
    """
    answer_start = document.answer.index(True)
    text_start = 0 if answer_start <= 1 else answer_start
    texts = [document.ids[:answer_start], document.ids[text_start : text_start + MAX_START_TOKENS]]
    prompt, answer = tokenizer.batch_decode(texts, skip_special_tokens=True)
    known = [document.first_question] if document.first_question else []
    return [*known, *prompt_hashes(prompt, answer)]


def choose_vocabulary(draft: Draft, target: Target, rows: Packed, folder: Path | None) -> None:
    """Choose the draft's vocabulary by the tokens of the answers, and print its coverage and that of other sizes.

    `folder`: where the table is also written; None in processes that print and write nothing.
    """
    documents = (rows.documents[number] for number in rows.document_numbers.tolist())
    counts = count_answer_tokens(documents, target.vocab_size, None if draft.kept_ids is None else target.tokenizer)
    required_ids = required_token_ids(target.tokenizer)
    if (size := draft.chosen_vocab_size) is not None:
        kept_ids = choose_kept_ids(counts.total, size, required_ids)
        draft.set_vocabulary(kept_ids, target)
        log.info("draft: coverage %.4g", token_coverage(counts.total, kept_ids))
    if draft.kept_ids is not None and folder is not None:
        sizes = sizes_around(len(draft.kept_ids), len(required_ids), target.vocab_size)
        coverage = build_coverage_table(counts, sizes, required_ids)
        print_table(coverage[0], coverage[1:])
        text = render_markdown_table(coverage[0], coverage[1:])
        (folder / VOCABULARY_FILE).write_text(text + "\n")
