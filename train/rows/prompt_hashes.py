"""What a run leaves behind of its training prompts: hashes to look held-out prompts up in."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.eval_prompts.contamination import FILE, START_CHARS, packed, signs
from data.packing.documents import Packed
from data.packing.pack import DOCUMENT
from data.sources.row_formats import Tokenised
from models.checkpoint import atomic_path
from train.run_dir import refuse_full_disk

MOST_TOKENS = 4 * START_CHARS  # that hold the beginning of an answer: a character has 4 bytes


def keep_hashes(rows: Packed, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the hashes of all prompts and answer starts in the rows."""
    seen: set[int] = set()
    for number in np.unique(rows.table[:, DOCUMENT]).tolist():
        seen.update(_signs(rows.documents[number], tokenizer))
    with (
        refuse_full_disk(folder),
        atomic_path(folder / FILE) as partial,
        partial.open("wb") as file,
    ):
        np.save(file, packed(seen))


def _signs(document: Tokenised, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All before its first answer, and how that begins.

    Where nothing but one token comes before it, the document is a plain text and begins itself.
    """
    begins = document.answer.index(True)
    first = 0 if begins <= 1 else begins
    texts = [document.ids[:begins], document.ids[first : first + MOST_TOKENS]]
    prompt, answer = tokenizer.batch_decode(texts, skip_special_tokens=True)
    return signs(prompt, answer)
