"""What a run leaves behind of its training prompts: hashes to look held-out prompts up in."""

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.batches import Packed
from data.contamination import FILE, START_CHARS, packed, signs
from models.checkpoint import atomic_path
from models.drafts.base import Batch
from train.disk import refuse_full_disk

MOST_TOKENS = 4 * START_CHARS  # that hold the beginning of an answer: a character has 4 bytes


def keep_hashes(rows: Packed, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the hashes of all prompts and answer starts in the rows."""
    seen: set[int] = set()
    for number in range(len(rows)):
        seen.update(_signs_of_row(rows.batch([number]), tokenizer))
    with (
        refuse_full_disk(folder),
        atomic_path(folder / FILE) as partial,
        partial.open("wb") as file,
    ):
        np.save(file, packed(seen))


def _signs_of_row(row: Batch, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Of every document: all before its first answer, and how that begins.

    Where nothing but one token comes before it, the document is a plain text and begins itself.
    """
    texts = []
    for number in range(int(row.document.max()) + 1):
        inside = row.document[0] == number
        ids, begins = row.ids[0, inside].tolist(), row.answer[0, inside].tolist().index(True)
        first = 0 if begins <= 1 else begins
        texts += [ids[:begins], ids[first : first + MOST_TOKENS]]
    decoded = tokenizer.batch_decode(texts, skip_special_tokens=True)
    return [
        sign
        for prompt, answer in zip(decoded[::2], decoded[1::2], strict=True)
        for sign in signs(prompt, answer)
    ]
