"""The definitions of all figures in the tables: on hover, under the tables, in docs/report.md."""

from collections.abc import Iterable

DEFINITIONS = {
    "tau": "tokens per round, the target's own included, over all rounds (acceptance length)",
    "delivered": "tokens per round that the user gets: tau without what is cut off after the end",
    "acceptance rate": "accepted / drafted tokens; of a tree, all its nodes count as drafted",
    "speed-up": "tokens/s over those of autoregressive decoding, same prompts and run",
    "tokens/s": "tokens kept after the first / seconds of all rounds, without the prefill",
    "lossless": "whether answers are the target's: yes (but for near-ties), no (some differ by "
    "more, or the rule is lossy), undecided (the near-tie gap is wider than the precision "
    "explains: decode in fp32) or in distribution (proven, not compared token by token)",
    "M params": "millions of parameters of the draft",
    "MB": "megabytes of the draft's weights and its state of one row",
    "draft ms": "milliseconds per round that the draft takes",
    "verify ms": "milliseconds per round to score the tree, accept a path and move the cache",
    "chain tau": "tau with one candidate per position",
    "tree tau": "tau with several candidates per position",
    "mismatched": "prompts whose answer is not the autoregressive one, token for token",
    "near-tie gap": "how close two logits must be for rounding to swap them, measured without trees",
    "explained gap": "the widest near-tie gap that precision and depth of the target explain",
    "beyond gap": "divergences at which the target preferred its own token by more than the near-tie gap",
    "widest divergence": "the widest logit gap of a divergence, its prompt and its position in the answer",
    "predicted": "speed-up of a loop without other costs: tau x (verify + accept) of autoregressive decoding / "
    "(verify + accept + cache move + draft)",
    "efficiency": "measured speed-up / predicted speed-up",
    "verify": "the target's pass over the tree",
    "accept": "the choice of a path by the rule of verification",
    "cache move": "keys and values of the accepted path moved to their places",
    "draft": "the draft reads what was emitted and proposes the next tree",
    "host": "reading the emitted tokens, and everything done with them outside the device",
    "round": "the whole unfused round, timed by itself",
    "fused round": "the same round as one graph, decoded in turns with the unfused one",
    "autoregressive tokens/s": "tokens/s of autoregressive decoding with as many rows at a time",
}


def select_definitions(words: Iterable[str]) -> dict[str, str]:
    """Return the definitions of `words`, in the order of this file; skip words without any.

    >>> list(select_definitions(["mode", "MB", "tau"]))
    ['tau', 'MB']
    """
    selected = set(words)
    return {word: meaning for word, meaning in DEFINITIONS.items() if word in selected}


def format_definitions(*words: str) -> str:
    """Return the definitions of `words` as text under a table.

    >>> format_definitions("round", "MB")
    "MB: megabytes of the draft's weights and its state of one row. round: the whole unfused round, timed by itself."
    """
    return " ".join(f"{word}: {meaning}." for word, meaning in select_definitions(words).items())
