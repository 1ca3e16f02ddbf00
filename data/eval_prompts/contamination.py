"""Whether a draft was trained on the prompts that it is judged by.

A run keeps 8 bytes of a hash of every training prompt and of how every training answer begins. A
held-out prompt is counted where its whole text is a training prompt, or where it begins as a
training answer does (a text to continue, cut out of a text learned from). Case, white space and
the Unicode form of accents do not matter. What this cannot see: the same question reworded, or in
the middle of a longer text.
"""

import hashlib
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import UInt64
from numpy import ndarray

from data.eval_prompts.prompts import EvalPrompt

FILE = "training_prompts.npy"  # beside report.json and checkpoint/
START_CHARS = 64  # shorter beginnings say too little to tell a text by


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """Which held-out prompts were trained on. Not checked: the reason why."""

    checked: bool
    count: int = 0
    ids: list[str] = field(default_factory=list)
    reason: str = ""


def contaminated(prompts: list[EvalPrompt], checkpoint_dir: Path) -> Contamination:
    """Look the prompts up in what the run of this checkpoint was trained on."""
    file = checkpoint_dir.resolve().parent / FILE
    try:
        seen = set(np.load(file, allow_pickle=False).tolist())
    except (OSError, ValueError, EOFError):
        return Contamination(checked=False, reason=f"the run left no readable {FILE}")
    ids = [prompt.id for prompt in prompts if seen.intersection(signs(prompt.text, prompt.text))]
    return Contamination(checked=True, count=len(ids), ids=ids)


def signs(prompt: str, answer: str) -> list[int]:
    """Hashes of a prompt's whole text, and of how an answer begins where it is long enough.

    >>> signs("Two  words", "") == signs("two words ", "a short answer")
    True
    """
    found = [hashed("prompt", normalised(prompt))]
    start = normalised(answer)[:START_CHARS]
    return found + ([hashed("answer", start)] if len(start) == START_CHARS else [])


def normalised(text: str) -> str:
    """Without what makes no difference to a reader: case, how white space and accents are written.

    >>> normalised("Caf\u00e9  au lait") == normalised("CAFE\u0301 au\\nlait")
    True
    """
    return unicodedata.normalize("NFC", " ".join(text.casefold().split()))


def packed(signs: set[int]) -> UInt64[ndarray, " signs"]:
    """As the file holds them."""
    return np.array(sorted(signs), dtype=np.uint64)


def hashed(kind: str, text: str) -> int:
    """64 bits of a text; what the hash is for keeps it apart from others."""
    return int.from_bytes(hashlib.blake2b(f"{kind} {text}".encode(), digest_size=8).digest(), "big")
