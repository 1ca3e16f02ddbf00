"""Detection of the language of a text."""

from functools import cache
from typing import Any

UNKNOWN_LANGUAGE = "und"  # ISO 639-3 for undetermined: code, numbers, a word or two
MIN_PROBABILITY = 0.5  # a less probable language counts as undetermined
MAX_CHARS = 400  # leading characters of a text that are classified


def detect_language(text: str) -> str:
    """Return the ISO 639-1 code of the likeliest language; `und` where none is likely.

    >>> detect_language("Wer zuletzt lacht, lacht am besten."), detect_language("x = [1, 2]")
    ('de', 'und')
    """
    language, _ = _load_identifier().classify(text[:MAX_CHARS])
    return UNKNOWN_LANGUAGE if language == "zxx" else language  # zxx: no linguistic content


@cache
def _load_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # loads a model: 0.5 s

    return LanguageIdentifier.from_model_file(
        MODEL_FILE, norm_probs=True, min_confidence=MIN_PROBABILITY
    )
