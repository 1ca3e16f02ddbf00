"""Batched answers by the target, which drafts are trained on."""

from collections.abc import Iterator, Sequence
from operator import add

from infer.engine.decode import Decoder
from models.speculate.sampling import SamplingConf
from models.target.language_model import LanguageModel


def generate_answers(
    target: LanguageModel, prompts: list[list[int]], *, max_new_tokens: int | Sequence[int],
    sampling: SamplingConf, batch: int = 64, row_ids: list[int] | None = None,
    slots: int | None = None,
) -> Iterator[tuple[int, list[int]]]:  # fmt: skip
    """Yield the index in `prompts` and the answer of each prompt, shortest prompts first.

    An answer does not depend on the rest of its batch: noise is keyed by `row_ids`, or by index.
    Prompts of similar length share a batch, which is padded to its longest, or to `slots`: then
    all calls have the same shapes.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    fixed = slots is not None and target.device.has_static_shapes
    batch_rows = batch if fixed else min(batch, len(prompts))
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(by_length), batch):
        rows = by_length[first : first + batch]
        batch_prompts = [prompts[row] for row in rows]
        batch_limits = [limits[row] for row in rows]
        needed = max(map(add, map(len, batch_prompts), batch_limits))
        decoder = Decoder(target, sampling=sampling, slots=slots or needed, batch=batch_rows)
        answers = decoder.decode(
            batch_prompts,
            row_ids=[row_ids[row] for row in rows] if row_ids else rows,
            max_new_tokens=batch_limits,
            eos_ids=target.eos_ids,
        )
        yield from ((row, answer.ids) for row, answer in zip(rows, answers, strict=True))
