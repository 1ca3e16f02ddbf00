"""Build the demo's prompts in four categories: held-out ones to evaluate on, others to train on.

The held-out `code` and `docs` prompts are cut from the interpreter's own library at run time;
`structured` and `open_ended` were written for this project (`written_prompts.jsonl`). Texts that
follow a rule (counting, repetition, records with fixed keys) are generated to train on.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path

from data.demo.corpus import library_texts

CATEGORIES = ("code", "docs", "structured", "open_ended")
PROMPTS_PER_CATEGORY = 16
PROMPT_CHARS = (90, 150)  # 24 to 56 tokens of the demo target
STRUCTURED_CHARS = 80  # fewer than in PROMPT_CHARS, because each digit is a token
MIN_ANSWER_CHARS = 150  # text that must follow a cut
CONTINUATION_CHARS = 600  # text stored after a cut: more tokens than answers have
WRITTEN_PROMPTS = Path(__file__).with_name("written_prompts.jsonl")
WORDS = """
    alpha amber anchor apple arrow autumn basil beacon birch blue bridge candle canyon cedar cloud copper coral
    cotton crystal delta desert ember falcon fern forest garden glacier green harbor hazel honey indigo island
    ivory jasmine juniper kite lantern lemon lilac linen maple marble meadow mint mirror moss north oak ocean
    olive orange orchid paper pearl pebble pepper pine plum prairie quartz rain raven red reef ribbon river rose
    saffron sage sand scarlet shadow silver sky snow south spring stone summer sun thistle tide timber topaz
    tulip valley velvet violet walnut water willow wind winter yellow zephyr
""".split()  # noqa: SIM905 - a list would take a line for each word
KEYS = ["id", "name", "color", "size", "count", "price", "city", "active", "score", "level", "kind", "weight"]


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
        # Held-out text that training text repeats is not unseen.
        training_text = "\0".join(library_texts(category, held_out=False))
        texts = _interleave_cuts(cut(text) for text in library_texts(category, held_out=True))
        unseen = (text for text in texts if text not in training_text)
        prompts += _number_prompts(category, list(islice(unseen, PROMPTS_PER_CATEGORY)), category)
    return prompts + [DemoPrompt(**json.loads(line)) for line in WRITTEN_PROMPTS.read_text().splitlines()]


def training_prompts(count: int, seed: int) -> list[DemoPrompt]:
    """Return at most `count` distinct prompts from training files, the four categories in turn."""
    code, docs = (library_texts(kind, held_out=False) for kind in ("code", "docs"))
    share = -(-count // len(CATEGORIES))  # rounded up
    continuations = {  # by category, then by prompt
        "code": _merge_cuts(_cut_code(text) for text in code),
        "docs": _merge_cuts(_cut_prose(text) for text in docs),
        "structured": _merge_cuts(map(_cut_structured, structured_texts(2 * share, seed=seed))),
        "open_ended": _merge_cuts(_cut_inner_paragraphs(text) for text in docs),
    }
    held_out = {prompt.text for prompt in held_out_prompts()}
    rng = random.Random(seed)
    prompts_by_category = []
    for category in CATEGORIES:
        texts = sorted(set(continuations[category]) - held_out)
        sampled = rng.sample(texts, k=min(share, len(texts)))
        numbered = _number_prompts(f"train-{category}", sampled, category)
        prompts_by_category.append([replace(p, continuation=continuations[category][p.text]) for p in numbered])
    return [prompt for turn in zip(*prompts_by_category, strict=False) for prompt in turn][:count]


def _merge_cuts(groups: Iterable[PromptCuts]) -> PromptCuts:
    return {cut: continuation for cuts in groups for cut, continuation in cuts.items()}


def _number_prompts(prefix: str, texts: list[str], category: str) -> list[DemoPrompt]:
    return [DemoPrompt(id=f"{prefix}-{i:02d}", category=category, text=text) for i, text in enumerate(texts)]


def _interleave_cuts(groups: Iterator[PromptCuts]) -> list[str]:
    """Return one cut of every file, then a second of every file, so that no file dominates."""
    ordered = [sorted(set(cuts), key=_hash_text) for cuts in groups]
    ordered.sort(key=lambda cuts: _hash_text(cuts[0]) if cuts else "")
    turns = zip_longest(*ordered)
    return list(dict.fromkeys(cut for turn in turns for cut in turn if cut is not None))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cut_code(source: str) -> PromptCuts:
    """Cut out the first lines of every function and class, as many whole lines as fit."""
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


def structured_texts(count: int, *, seed: int) -> list[str]:
    """Generate `count` texts of 8 to 60 items, each following a single rule.

    The standard library has little such text: a model trained without it loops on such prompts.
    """
    rng = random.Random(seed)
    generators = [_make_counting, _make_listing, _make_records, _make_cycle, _make_table, _make_assignments]
    return [rng.choice(generators)(rng) for _ in range(count)]


def _make_counting(rng: random.Random) -> str:
    start, step = rng.randrange(200), rng.choice([1, 1, 1, 2, 5, 10])
    separator = rng.choice([", ", " ", "\n", "; "])
    return separator.join(str(start + step * i) for i in range(rng.randint(30, 60))) + "\n"


def _make_listing(rng: random.Random) -> str:
    word = rng.choice(WORDS)
    mark = rng.choice(["{w} {i}", "{w}_{i}", "{i}. {w}", "- {w} {i}", "{w}[{i}]"])
    end = rng.choice(["", ": " + rng.choice(WORDS), " = " + rng.choice(WORDS), ","])
    start = rng.randrange(60)
    return "".join(mark.format(w=word, i=start + i) + end + "\n" for i in range(rng.randint(12, 30)))


def _make_value(rng: random.Random, key: str, index: int) -> object:
    if key == "id":
        return index
    if key == "active":
        return rng.random() < 0.5
    if key in {"name", "color", "city", "kind"}:
        return rng.choice(WORDS)
    return rng.randrange(100)


def _make_records(rng: random.Random) -> str:
    keys = ["id", *rng.sample(KEYS[1:], rng.randint(2, 3))]
    start = rng.randrange(40)
    lines = [json.dumps({key: _make_value(rng, key, start + i) for key in keys}) for i in range(rng.randint(8, 16))]
    return rng.choice(["[\n  " + ",\n  ".join(lines) + "\n]\n", "\n".join(lines) + "\n"])


def _make_cycle(rng: random.Random) -> str:
    words = rng.sample(WORDS, rng.randint(2, 5))
    separator = rng.choice([" ", ", ", "\n", " -> "])
    return separator.join(words[i % len(words)] for i in range(rng.randint(20, 50))) + "\n"


def _make_table(rng: random.Random) -> str:
    words = rng.sample(WORDS, 2)
    start = rng.randrange(50)
    rows = (f"{start + i},{rng.choice(WORDS)},{rng.randrange(100)}\n" for i in range(rng.randint(12, 24)))
    return "".join([f"id,{words[0]},{words[1]}\n", *rows])


def _make_assignments(rng: random.Random) -> str:
    word, factor = rng.choice(WORDS), rng.randint(1, 9)
    start = rng.randrange(30)
    end = start + rng.randint(12, 30)
    return "".join(f"{word}_{i} = {i * factor}\n" for i in range(start, end))
