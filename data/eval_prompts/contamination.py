"""A check that a draft was not trained on the prompts that evaluate it.

A run stores an 8-byte hash of every training prompt and of the beginning of every training answer.
A held-out prompt counts as contaminated if its whole text is a training prompt, or if it begins
like a training answer (a text to continue, cut out of a training text). Case, white space and the
Unicode form of accents do not matter. The check misses reworded questions, and prompts in the
middle of a longer text.
"""

import hashlib
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.eval_prompts.prompts import EvalPrompt

PROMPT_HASHES_FILE = "training_prompts.npy"  # uint64, beside report.json and checkpoint/
ANSWER_START_CHARS = 64  # shorter beginnings are too common to identify a text


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """The held-out prompts that were trained on; `reason` explains a check that did not run."""

    checked: bool
    count: int = 0
    ids: list[str] = field(default_factory=list)
    reason: str = ""


def check_contamination(prompts: list[EvalPrompt], checkpoint_dir: Path) -> Contamination:
    """Return the held-out prompts that occur in the training data of the checkpoint's run.

    If the run's file of hashes cannot be read, the result says so in `reason`.
    """
    file = checkpoint_dir.resolve().parent / PROMPT_HASHES_FILE
    try:
        training_hashes = set(np.load(file, allow_pickle=False).tolist())
    except (OSError, ValueError, EOFError):
        return Contamination(checked=False, reason=f"the run left no readable {PROMPT_HASHES_FILE}")
    ids = [
        prompt.id
        for prompt in prompts
        if training_hashes.intersection(prompt_hashes(prompt.text, prompt.text))
    ]
    return Contamination(checked=True, count=len(ids), ids=ids)


def prompt_hashes(prompt: str, answer: str) -> list[int]:
    """Return hashes of a prompt's whole text, and of the beginning of a long enough answer.

    >>> prompt_hashes("Two  words", "") == prompt_hashes("two words ", "a short answer")
    True
    """
    start = normalize_text(answer)[:ANSWER_START_CHARS]
    start_hashes = [hash_text("answer", start)] if len(start) == ANSWER_START_CHARS else []
    return [hash_text("prompt", normalize_text(prompt)), *start_hashes]


def normalize_text(text: str) -> str:
    r"""Return the text casefolded, in Unicode NFC, with each run of whitespace as one space.

    >>> normalize_text("Caf\u00e9  au lait") == normalize_text("CAFE\u0301 au\nlait")
    True
    """
    return unicodedata.normalize("NFC", " ".join(text.casefold().split()))


def hash_text(kind: str, text: str) -> int:
    """Return a 64-bit hash of a text; `kind` separates hashes for different purposes."""
    return int.from_bytes(hashlib.blake2b(f"{kind} {text}".encode(), digest_size=8).digest(), "big")
