"""Hashes of texts, by which questions are compared: duplicates, held-out prompts, contamination."""

import hashlib
import unicodedata
from typing import Any

ANSWER_START_CHARS = 64  # shorter beginnings are too common to identify a text


def normalize_text(text: str) -> str:
    r"""Return the text casefolded, in Unicode NFC, with each run of whitespace as one space.

    >>> normalize_text("Caf\u00e9  au lait") == normalize_text("CAFE\u0301 au\nlait")
    True
    """
    return unicodedata.normalize("NFC", " ".join(text.casefold().split()))


def hash_text(kind: str, text: str) -> int:
    """Return a 64-bit hash of a text; `kind` separates hashes for different purposes."""
    return int.from_bytes(hashlib.blake2b(f"{kind} {text}".encode(), digest_size=8).digest(), "big")


def hash_prompt(text: str) -> int:
    """Return the hash of a prompt, or of a question without what stands before it."""
    return hash_text("prompt", normalize_text(text))


def hash_first_question(messages: list[dict[str, Any]]) -> int:
    """Return the hash of the first user message, or 0 if there is none.

    The system prompt does not count: it may hold a date or a name, and the question is the same.
    """
    return next((hash_prompt(m["content"]) for m in messages if m["role"] == "user"), 0)


def prompt_hashes(prompt: str, answer: str) -> list[int]:
    """Return hashes of a prompt's whole text, and of the beginning of a long enough answer.

    >>> prompt_hashes("Two  words", "") == prompt_hashes("two words ", "a short answer")
    True
    """
    start = normalize_text(answer)[:ANSWER_START_CHARS]
    start_hashes = [hash_text("answer", start)] if len(start) == ANSWER_START_CHARS else []
    return [hash_prompt(prompt), *start_hashes]
