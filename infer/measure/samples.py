"""Split a few answers into spans that show which tokens were drafted, for the report."""

from collections.abc import Iterator
from itertools import groupby

from data.eval_prompts.prompts import EvalPrompt
from infer.measure.records import PromptResult
from infer.measure.results import SampleAnswer, TextSpan
from models.target.target import Target

MAX_SAMPLES = 4  # answers shown for each draft


def collect_samples(
    target: Target, prompts: list[EvalPrompt], results: list[PromptResult], *, mode: str
) -> list[SampleAnswer]:
    """Split the answers to the first prompt of each category into spans, MAX_SAMPLES at most."""
    first = {prompt.category: prompt for prompt in reversed(prompts)}
    chosen = [prompt for prompt in prompts if first[prompt.category] is prompt][:MAX_SAMPLES]
    by_id = {result.prompt_id: result for result in results}
    return [
        SampleAnswer(prompt_id=p.id, mode=mode, pieces=_split_spans(target, p, by_id[p.id]))
        for p in chosen
    ]


def _split_spans(target: Target, prompt: EvalPrompt, result: PromptResult) -> list[TextSpan]:
    """Split prompt and answer into spans of text of one origin.

    A character of several tokens belongs to the token that completes it.
    """
    decode = target.tokenizer.decode
    text = decode(prompt.ids)
    pieces = [("prompt", text)]
    for i, kind in enumerate(token_origins(result), 1):
        longer = decode(prompt.ids + result.ids[:i])
        if not longer.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces.append((kind, longer[len(text) :]))
            text = longer
    return [
        TextSpan(text="".join(piece for _, piece in group), kind=kind)
        for kind, group in groupby(pieces, key=lambda piece: piece[0])
    ]


def token_origins(result: PromptResult) -> Iterator[str]:
    """Yield the origin of each token of the answer: `target`, or `accepted` for a draft token."""
    origins = ["target"]
    for accepted in result.accepted:
        origins += ["accepted"] * accepted + ["target"]
    yield from origins[: len(result.ids)]
