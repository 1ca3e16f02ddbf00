"""Answers by the target, many prompts at a time: what a draft learns from."""

from collections.abc import Iterator, Sequence
from operator import add

from infer.engine.decode import Decoder
from models.speculate.sampling import SamplingConf
from models.target.language_model import Transformer


def answers(
    target: Transformer, prompts: list[list[int]], *, max_new_tokens: int | Sequence[int],
    sampling: SamplingConf, batch: int = 64, row_ids: list[int] | None = None,
    slots: int | None = None,
) -> Iterator[tuple[int, list[int]]]:  # fmt: skip
    """One answer a prompt, each the same whatever its neighbours in the batch are.

    Yields the prompt's place in `prompts` and the answer. Noise is keyed by `row_ids`, or by place.
    Prompts of like length are answered together: a batch is padded to its longest, or to `slots`,
    which gives all calls one shape.
    """
    most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    fixed = slots is not None and target.device.static
    rows_at_once = batch if fixed else min(batch, len(prompts))
    places = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    for first in range(0, len(places), batch):
        rows = places[first : first + batch]
        some = [prompts[row] for row in rows]
        limits = [most[row] for row in rows]
        needed = max(map(add, map(len, some), limits))
        decoder = Decoder(target, sampling=sampling, slots=slots or needed, batch=rows_at_once)
        keys = [row_ids[row] for row in rows] if row_ids else rows
        done = decoder.decode(some, row_ids=keys, max_new_tokens=limits, eos_ids=target.eos_ids)
        yield from ((row, answer.ids) for row, answer in zip(rows, done, strict=True))
