"""Build the demo's prompts in four categories: held-out ones to evaluate on, others to train on.

The held-out `code` and `docs` prompts are cut from the interpreter's own library at run time;
`structured` and `open_ended` were written for this project (`written_prompts.jsonl`).
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path

from data.demo.corpus import held_out_texts, training_texts
from data.demo.structured import structured_texts

CATEGORIES = ("code", "docs", "structured", "open_ended")
PROMPTS_PER_CATEGORY = 16
PROMPT_CHARS = (90, 150)  # 24 to 56 tokens of the demo target
STRUCTURED_CHARS = 80  # fewer than in PROMPT_CHARS, because each digit is a token
MIN_ANSWER_CHARS = 150  # text that must follow a cut
CONTINUATION_CHARS = 600  # text stored after a cut: more tokens than answers have
WRITTEN_PROMPTS = Path(__file__).with_name("written_prompts.jsonl")


PromptCuts = dict[str, str]  # the text of a prompt to the text that follows it


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """A text to continue; metrics are reported by category."""

    id: str
    category: str
    text: str
    continuation: str = ""  # the text that follows in the file; training prompts only


def held_out_prompts() -> list[DemoPrompt]:
    """Build 16 prompts per category from text that neither target nor draft was trained on."""
    prompts = []
    for category, cut in (("code", _cut_code), ("docs", _cut_prose)):
        training_text = "\0".join(training_texts(category))  # held-out text may occur here too
        texts = _interleave_cuts(cut(text) for text in held_out_texts(category))
        unseen = (text for text in texts if text not in training_text)
        prompts += _number_prompts(category, list(islice(unseen, PROMPTS_PER_CATEGORY)), category)
    return prompts + [
        DemoPrompt(**json.loads(line)) for line in WRITTEN_PROMPTS.read_text().splitlines()
    ]


def training_prompts(count: int, seed: int) -> list[DemoPrompt]:
    """Build at most `count` different prompts from training files, the four categories in turn.

    The `open_ended` prompts are paragraphs from inside the library's documentation.
    """
    code, docs = training_texts("code"), training_texts("docs")
    share = -(-count // len(CATEGORIES))
    cuts = {
        "code": _merge_cuts(_cut_code(text) for text in code),
        "docs": _merge_cuts(_cut_prose(text) for text in docs),
        "structured": _merge_cuts(map(_cut_structured, structured_texts(2 * share, seed=seed))),
        "open_ended": _merge_cuts(_cut_inner_paragraphs(text) for text in docs),
    }
    held_out = {prompt.text for prompt in held_out_prompts()}
    rng = random.Random(seed)
    prompts = []
    for category in CATEGORIES:
        texts = sorted(set(cuts[category]) - held_out)
        sampled = rng.sample(texts, k=min(share, len(texts)))
        numbered = _number_prompts(f"train-{category}", sampled, category)
        prompts.append([replace(p, continuation=cuts[category][p.text]) for p in numbered])
    return [prompt for turn in zip(*prompts, strict=False) for prompt in turn][:count]


def _merge_cuts(groups: Iterable[PromptCuts]) -> PromptCuts:
    return {cut: continuation for cuts in groups for cut, continuation in cuts.items()}


def _number_prompts(prefix: str, texts: list[str], category: str) -> list[DemoPrompt]:
    return [
        DemoPrompt(id=f"{prefix}-{i:02d}", category=category, text=text)
        for i, text in enumerate(texts)
    ]


def _interleave_cuts(groups: Iterator[PromptCuts]) -> list[str]:
    """Return one cut of every file, then a second of every file, so that no file dominates."""
    ordered = [sorted(set(cuts), key=_hash_text) for cuts in groups]
    ordered.sort(key=lambda cuts: _hash_text(cuts[0]) if cuts else "")
    turns = zip_longest(*ordered)
    return list(dict.fromkeys(cut for turn in turns for cut in turn if cut is not None))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cut_code(source: str) -> PromptCuts:
    """Cut the first lines of every function and class, as many full lines as fit."""
    low, high = PROMPT_CHARS
    cuts = {}
    for match in re.finditer(r"^ *(?:def|class|async def) ", source, flags=re.MULTILINE):
        start = match.start()
        end = source.rfind("\n", start, start + high)
        if end - start >= low and end + MIN_ANSWER_CHARS <= len(source):
            cuts |= _cut_text(source[start:], end - start)
    return cuts


def _cut_prose(text: str) -> PromptCuts:
    """Cut the start of a document after a word; skip short documents and shell sessions."""
    end = text.rfind(" ", *PROMPT_CHARS)
    too_short = end < 0 or len(text) < end + MIN_ANSWER_CHARS
    return {} if too_short or ">>>" in text[:end] else _cut_text(text, end)


def _cut_inner_paragraphs(text: str) -> PromptCuts:
    """Cut the start of each paragraph after the first that begins like prose."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text)[1:])
    prose = (part for part in paragraphs if re.match(r"[A-Z][a-z]+ [a-z]+ [a-z]+ ", part))
    return _merge_cuts(map(_cut_prose, prose))


def _cut_structured(text: str) -> PromptCuts:
    """Cut the start of a structured text, long enough to show its rule."""
    return _cut_text(text, len(text[: STRUCTURED_CHARS + 1].rsplit(maxsplit=1)[0]))


def _cut_text(text: str, end: int) -> PromptCuts:
    """Cut a text at `end`, without trailing spaces, and keep the text that follows."""
    prompt = text[:end].rstrip()
    return {prompt: text[len(prompt) : len(prompt) + CONTINUATION_CHARS]}
