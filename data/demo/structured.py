"""Generate texts that follow a rule: counting, repetition and records with fixed keys.

The standard library has little such text, and a model trained without it loops on such prompts.
"""

import json
import random

WORDS = [
    "alpha", "amber", "anchor", "apple", "arrow", "autumn", "basil", "beacon", "birch", "blue",
    "bridge", "candle", "canyon", "cedar", "cloud", "copper", "coral", "cotton", "crystal",
    "delta", "desert", "ember", "falcon", "fern", "forest", "garden", "glacier", "green",
    "harbor", "hazel", "honey", "indigo", "island", "ivory", "jasmine", "juniper", "kite",
    "lantern", "lemon", "lilac", "linen", "maple", "marble", "meadow", "mint", "mirror", "moss",
    "north", "oak", "ocean", "olive", "orange", "orchid", "paper", "pearl", "pebble", "pepper",
    "pine", "plum", "prairie", "quartz", "rain", "raven", "red", "reef", "ribbon", "river",
    "rose", "saffron", "sage", "sand", "scarlet", "shadow", "silver", "sky", "snow", "south",
    "spring", "stone", "summer", "sun", "thistle", "tide", "timber", "topaz", "tulip", "valley",
    "velvet", "violet", "walnut", "water", "willow", "wind", "winter", "yellow", "zephyr",
]  # fmt: skip
KEYS = [
    "id", "name", "color", "size", "count", "price", "city", "active", "score", "level", "kind",
    "weight",
]  # fmt: skip


def structured_texts(count: int, *, seed: int) -> list[str]:
    """Generate `count` texts of 8 to 60 items, each following a single rule."""
    rng = random.Random(seed)
    generators = [
        _make_counting,
        _make_listing,
        _make_records,
        _make_cycle,
        _make_table,
        _make_assignments,
    ]
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
    return "".join(
        mark.format(w=word, i=start + i) + end + "\n" for i in range(rng.randint(12, 30))
    )


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
    lines = [
        json.dumps({key: _make_value(rng, key, start + i) for key in keys})
        for i in range(rng.randint(8, 16))
    ]
    return rng.choice(["[\n  " + ",\n  ".join(lines) + "\n]\n", "\n".join(lines) + "\n"])


def _make_cycle(rng: random.Random) -> str:
    words = rng.sample(WORDS, rng.randint(2, 5))
    separator = rng.choice([" ", ", ", "\n", " -> "])
    return separator.join(words[i % len(words)] for i in range(rng.randint(20, 50))) + "\n"


def _make_table(rng: random.Random) -> str:
    words = rng.sample(WORDS, 2)
    start = rng.randrange(50)
    rows = [
        f"{start + i},{rng.choice(WORDS)},{rng.randrange(100)}" for i in range(rng.randint(12, 24))
    ]
    return "\n".join([f"id,{words[0]},{words[1]}", *rows]) + "\n"


def _make_assignments(rng: random.Random) -> str:
    word, factor = rng.choice(WORDS), rng.randint(1, 9)
    start = rng.randrange(30)
    rows = [f"{word}_{start + i} = {(start + i) * factor}" for i in range(rng.randint(12, 30))]
    return "\n".join(rows) + "\n"
