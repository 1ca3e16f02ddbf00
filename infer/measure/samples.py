"""Split a few answers into spans that show which tokens were drafted, for the report."""

from itertools import groupby
from operator import itemgetter

from infer.engine.requests import Generation
from infer.measure.records import PromptResult
from infer.measure.report_schema import SampleAnswer, TextKind, TextSpan
from models.target.target import Target

MAX_SAMPLES = 4  # answers shown for each draft


def collect_samples(
    target: Target, tree_results: list[PromptResult], *, draft: str
) -> list[SampleAnswer]:
    """Return answers as spans: to the first prompt of each category, MAX_SAMPLES at most."""
    first: dict[str, PromptResult] = {}
    for result in tree_results:
        first.setdefault(result.prompt.category, result)
    return [
        SampleAnswer(
            draft=draft, prompt_id=r.prompt.id, mode="tree", pieces=_split_spans(target, r)
        )
        for r in list(first.values())[:MAX_SAMPLES]
    ]


def _split_spans(target: Target, result: PromptResult) -> list[TextSpan]:
    """Return prompt and answer as spans of text of one origin.

    A character of several tokens belongs to the token that completes it.
    """
    decode = target.tokenizer.decode
    prompt_ids, answer = result.prompt.ids, result.generation
    text = decode(prompt_ids)
    pieces: list[tuple[TextKind, str]] = [("prompt", text)]
    for i, kind in enumerate(token_origins(answer), 1):
        longer = decode(prompt_ids + answer.ids[:i])
        if not longer.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces.append((kind, longer[len(text) :]))
            text = longer
    return [
        TextSpan(text="".join(piece for _, piece in group), kind=kind)
        for kind, group in groupby(pieces, key=itemgetter(0))
    ]


def token_origins(answer: Generation) -> list[TextKind]:
    """Return the origin of each token: `target`, or `accepted` for a draft token."""
    origins: list[TextKind] = ["target"]
    for accepted in answer.accepted:
        origins.extend("accepted" for _ in range(accepted))
        origins.append("target")
    return origins[: len(answer.ids)]
