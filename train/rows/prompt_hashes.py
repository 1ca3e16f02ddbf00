"""Hashes of a run's training prompts, in which held-out prompts are looked up later."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.eval_prompts.contamination import (
    ANSWER_START_CHARS,
    PROMPT_HASHES_FILE,
    prompt_hashes,
)
from data.packing.documents import Packed
from data.packing.pack import DOCUMENT
from data.sources.row_formats import TokenizedDocument
from models.files import atomic_path
from train.run_dir import refuse_full_disk

# Enough for the beginning of an answer: a character has at most 4 bytes, a token at least one.
MAX_START_TOKENS = 4 * ANSWER_START_CHARS


def write_prompt_hashes(rows: Packed, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the hashes of all prompts and answer starts in the rows."""
    hashes: set[int] = set()
    for number in np.unique(rows.table[:, DOCUMENT]).tolist():
        hashes.update(_hash_document(rows.documents[number], tokenizer))
    with (
        refuse_full_disk(folder),
        atomic_path(folder / PROMPT_HASHES_FILE) as partial,
        partial.open("wb") as file,
    ):
        np.save(file, np.array(sorted(hashes), np.uint64))


def _hash_document(document: TokenizedDocument, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Hash the text before the first answer, and the beginning of the answer.

    With at most one token before the answer, the document is a plain text: its beginning is hashed.
    """
    answer_start = document.answer.index(True)
    text_start = 0 if answer_start <= 1 else answer_start
    texts = [document.ids[:answer_start], document.ids[text_start : text_start + MAX_START_TOKENS]]
    prompt, answer = tokenizer.batch_decode(texts, skip_special_tokens=True)
    return prompt_hashes(prompt, answer)
