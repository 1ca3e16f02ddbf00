"""Answers by the target, many prompts at a time: what a draft learns from."""

from collections.abc import Iterator

from infer.decode import Decoder
from models.sampling import SamplingConf
from models.transformer import Transformer


def answers(
    target: Transformer, prompts: list[list[int]], *, max_new_tokens: int, sampling: SamplingConf,
    batch: int = 64, row_ids: list[int] | None = None,
) -> Iterator[tuple[int, list[int]]]:  # fmt: skip
    """One answer a prompt, each the same whatever its neighbours in the batch are.

    Yields the prompt's place in `prompts` and the answer. Noise is keyed by `row_ids`, or by place.
    Prompts of like length are answered together: a batch is padded to its longest.
    """
    places = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    for first in range(0, len(places), batch):
        rows = places[first : first + batch]
        some = [prompts[row] for row in rows]
        slots = len(some[-1]) + max_new_tokens
        decoder = Decoder(target, sampling=sampling, slots=slots, batch=min(batch, len(prompts)))
        keys = [row_ids[row] for row in rows] if row_ids else rows
        done = decoder.decode(
            some, row_ids=keys, max_new_tokens=max_new_tokens, eos_ids=target.eos_ids
        )
        yield from ((row, answer.ids) for row, answer in zip(rows, done, strict=True))
