"""Prompts of the demo: held-out ones in four categories to measure by, others to distil from.

`code` and `docs` are cut from the interpreter's own library at run time; `structured` and
`open_ended` were written for this project (`written_prompts.jsonl`).
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
PER_CATEGORY = 16
PROMPT_CHARS = (90, 150)  # 24 to 56 tokens of the demo target
STRUCTURED_CHARS = 80  # digits are one token each
MIN_ANSWER_CHARS = 150  # how much text must follow a cut
REST_CHARS = 600  # of what follows a cut: more tokens than answers have
WRITTEN = Path(__file__).with_name("written_prompts.jsonl")


Cuts = dict[str, str]  # beginnings of texts, and how they go on


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to continue; the category is what its figures are reported under."""

    id: str
    category: str
    text: str
    rest: str = ""  # what the text says next; of training prompts


def held_out_prompts() -> list[Prompt]:
    """Sixteen prompts a category, from text that neither target nor draft was trained on."""
    cuts = {"code": _code_cuts, "docs": _prose_cuts}
    found = []
    for category, cut in cuts.items():
        trained_on = "\0".join(training_texts(category))  # the library repeats itself in places
        texts = _interleave(cut(text) for text in held_out_texts(category))
        unseen = (text for text in texts if text not in trained_on)
        found += _number(category, list(islice(unseen, PER_CATEGORY)), category)
    return found + [Prompt(**json.loads(line)) for line in WRITTEN.read_text().splitlines()]


def training_prompts(count: int, seed: int) -> list[Prompt]:
    """At most `count` different prompts from training files, the four categories in turn.

    The prose to train on is the library's too: paragraphs from inside its documentation.
    """
    code, docs = training_texts("code"), training_texts("docs")
    share = -(-count // len(CATEGORIES))
    cuts = {
        "code": _joined(_code_cuts(text) for text in code),
        "docs": _joined(_prose_cuts(text) for text in docs),
        "structured": _joined(map(_structured_cut, structured_texts(2 * share, seed=seed))),
        "open_ended": _joined(_inner_paragraphs(text) for text in docs),
    }
    unseen = {prompt.text for prompt in held_out_prompts()}
    rng = random.Random(seed)
    prompts = []
    for category in CATEGORIES:
        texts = sorted(set(cuts[category]) - unseen)
        picked = rng.sample(texts, k=min(share, len(texts)))
        numbered = _number(f"train-{category}", picked, category)
        prompts.append([replace(p, rest=cuts[category][p.text]) for p in numbered])
    return [prompt for turn in zip(*prompts, strict=False) for prompt in turn][:count]


def _joined(groups: Iterable[Cuts]) -> Cuts:
    return {cut: rest for cuts in groups for cut, rest in cuts.items()}


def _number(prefix: str, texts: list[str], category: str) -> list[Prompt]:
    return [
        Prompt(id=f"{prefix}-{i:02d}", category=category, text=text) for i, text in enumerate(texts)
    ]


def _interleave(groups: Iterator[Cuts]) -> list[str]:
    """One cut of every file, then a second of every file: no file dominates."""
    ordered = [sorted(set(cuts), key=_digest) for cuts in groups]
    ordered.sort(key=lambda cuts: _digest(cuts[0]) if cuts else "")
    turns = zip_longest(*ordered)
    return list(dict.fromkeys(cut for turn in turns for cut in turn if cut is not None))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _code_cuts(source: str) -> Cuts:
    """The first lines of every function and class, as many whole ones as fit."""
    low, high = PROMPT_CHARS
    cuts = {}
    for match in re.finditer(r"^ *(?:def|class|async def) ", source, flags=re.MULTILINE):
        start = match.start()
        end = source.rfind("\n", start, start + high)
        if end - start >= low and end + MIN_ANSWER_CHARS <= len(source):
            cuts |= _cut(source[start:], end - start)
    return cuts


def _prose_cuts(text: str) -> Cuts:
    """The start of a document, cut after a word; none where it is short or a shell session."""
    end = text.rfind(" ", *PROMPT_CHARS)
    too_short = end < 0 or len(text) < end + MIN_ANSWER_CHARS
    return {} if too_short or ">>>" in text[:end] else _cut(text, end)


def _inner_paragraphs(text: str) -> Cuts:
    """The start of each later paragraph that reads as prose."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text)[1:])
    prose = (part for part in paragraphs if re.match(r"[A-Z][a-z]+ [a-z]+ [a-z]+ ", part))
    return _joined(map(_prose_cuts, prose))


def _structured_cut(text: str) -> Cuts:
    """The beginning of a text with a rule, long enough to show the rule."""
    return _cut(text, len(text[: STRUCTURED_CHARS + 1].rsplit(maxsplit=1)[0]))


def _cut(text: str, end: int) -> Cuts:
    """The text up to `end`, without the spaces there, and what follows."""
    prompt = text[:end].rstrip()
    return {prompt: text[len(prompt) : len(prompt) + REST_CHARS]}
