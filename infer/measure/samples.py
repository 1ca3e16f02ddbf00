"""A few answers in pieces, to see which tokens were drafted and which are the target's own."""

from collections.abc import Iterator
from itertools import groupby

from data.eval_prompts.prompts import EvalPrompt
from infer.measure.records import Trace
from infer.measure.results import Piece, Sample
from models.target.target import Target

MOST = 4  # samples of a draft


def samples(
    target: Target, prompts: list[EvalPrompt], traces: list[Trace], *, mode: str
) -> list[Sample]:
    """Answers to the first prompt of each category."""
    first = {prompt.category: prompt for prompt in reversed(prompts)}
    shown = [prompt for prompt in prompts if first[prompt.category] is prompt][:MOST]
    by_id = {trace.prompt_id: trace for trace in traces}
    return [
        Sample(prompt_id=p.id, mode=mode, pieces=_pieces(target, p, by_id[p.id])) for p in shown
    ]


def _pieces(target: Target, prompt: EvalPrompt, trace: Trace) -> list[Piece]:
    """Text in runs of one origin. A character of several tokens belongs to the one that ends it."""
    text = target.tokenizer.decode
    done = text(prompt.ids)
    found = [("prompt", done)]
    for i, kind in enumerate(origins(trace), 1):
        now = text(prompt.ids + trace.ids[:i])
        if not now.endswith("\N{REPLACEMENT CHARACTER}"):
            found.append((kind, now[len(done) :]))
            done = now
    return [
        Piece(text="".join(part for _, part in run), kind=kind)
        for kind, run in groupby(found, key=lambda piece: piece[0])
    ]


def origins(trace: Trace) -> Iterator[str]:
    """Of each token kept: `target` its own, `accepted` from the draft."""
    kinds = ["target"]
    for accepted in trace.accepted:
        kinds += ["accepted"] * accepted + ["target"]
    yield from kinds[: len(trace.ids)]
