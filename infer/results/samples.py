"""Split a few answers into spans that show which tokens were drafted, for the report."""

from itertools import groupby
from operator import itemgetter
from typing import Any

from data.chat.text_stream import split_text
from infer.engine.requests import Generation
from infer.results.records import PromptResult
from infer.results.schema import SampleAnswer, TextKind, TextSpan

MAX_SAMPLES = 4  # answers shown for each draft


def collect_samples(tokenizer: Any, results: list[PromptResult]) -> list[SampleAnswer]:
    """Return answers as spans: to the first prompt of each category, MAX_SAMPLES at most."""
    first: dict[str, PromptResult] = {}
    for result in results:
        first.setdefault(result.prompt.category, result)
    return [
        SampleAnswer(prompt_id=result.prompt.id, pieces=_split_spans(tokenizer, result))
        for result in list(first.values())[:MAX_SAMPLES]
    ]


def _split_spans(tokenizer: Any, result: PromptResult) -> list[TextSpan]:
    """Return prompt and answer as spans of text of one origin.

    A character of several tokens belongs to the token that completes it.
    """
    prompt_ids, answer = result.prompt.ids, result.generation
    kinds: list[TextKind] = [
        *("prompt" for _ in prompt_ids),
        *("accepted" if flag else "target" for flag in list_accepted(answer)),
    ]
    pieces, end = [], 0
    for num_tokens, text in split_text(tokenizer, [*prompt_ids, *answer.ids]):
        end += num_tokens
        pieces.append((kinds[end - 1], text))
    return [
        TextSpan(text="".join(text for _, text in group), kind=kind)
        for kind, group in groupby(pieces, key=itemgetter(0))
    ]


def list_accepted(answer: Generation) -> list[bool]:
    """Return for each token of an answer whether the draft proposed it.

    The first comes from the prefill, and the last of every round is the target's own.

    >>> list_accepted(Generation(ids=[5, 6, 7, 8], accepted=[2, 1]))
    [False, True, True, False]
    """
    flags = [False]
    for count in answer.accepted:
        flags += [True] * count + [False]
    return flags[: len(answer.ids)]
