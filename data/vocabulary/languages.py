"""In which language a text is written."""

from functools import cache
from typing import Any

UNKNOWN = "und"  # ISO 639-3: undetermined, as code, numbers and a word or two are
LEAST = 0.5  # probability of a language that is believed
CHARS = 400  # of a text that are looked at


def language_of(text: str) -> str:
    """ISO 639-1 code of the likeliest language; `und` where none is likely.

    >>> language_of("Wer zuletzt lacht, lacht am besten, sagt man."), language_of("x = [1, 2]")
    ('de', 'und')
    """
    found, _ = _identifier().classify(text[:CHARS])
    return UNKNOWN if found == "zxx" else found  # zxx: no language at all


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # reads its model: half a second

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=LEAST)
