"""Answers by the target, many prompts at a time: what a draft learns from."""

from collections.abc import Iterator

from infer.decode import Decoder
from models.sampling import SamplingConf
from models.target import Target


def answers(
    target: Target, prompts: list[list[int]], *, max_new_tokens: int, sampling: SamplingConf,
    batch: int = 64,
) -> Iterator[list[int]]:  # fmt: skip
    """One answer a prompt, in order, each the same whatever its neighbours in the batch are.

    The row id that keys the noise is the prompt's place in `prompts`.
    """
    slots = max(len(prompt) for prompt in prompts) + max_new_tokens
    decoder = Decoder(target, sampling=sampling, slots=slots, batch=min(batch, len(prompts)))
    for first in range(0, len(prompts), decoder.batch):
        some = prompts[first : first + decoder.batch]
        rows = list(range(first, first + len(some)))
        done = decoder.decode(
            some, row_ids=rows, max_new_tokens=max_new_tokens, eos_ids=target.eos_ids
        )
        yield from (row.ids for row in done)
