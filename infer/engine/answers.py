"""Generate the target's answers in batches, to train drafts on them."""

from collections.abc import Iterator, Sequence
from operator import add

from infer.engine.decode import Decoder
from models.targets.language_model import LanguageModel
from models.trees.sampling_config import SamplingConf


def generate_answers(
    target: LanguageModel,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: SamplingConf,
    eos_ids: list[int] | None = None,
    batch: int = 64,
    row_ids: list[int] | None = None,
    slots: int | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yield the index in `prompts` and the answer of each prompt, shortest prompts first.

    An answer does not depend on the rest of its batch: noise is keyed by `row_ids`, or without them
    by the prompt's index. Prompts of similar length share a batch. Its rows have as many slots as
    its longest prompt and answer need, or `slots`, with which all calls have the same shapes. They end
    at one of `eos_ids`, or of the target's own.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    fixed = slots is not None and target.device.has_static_shapes
    batch_rows = batch if fixed else min(batch, len(prompts))
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(by_length), batch):
        indices = by_length[first : first + batch]
        batch_prompts = [prompts[index] for index in indices]
        batch_limits = [limits[index] for index in indices]
        needed = max(map(add, map(len, batch_prompts), batch_limits))
        decoder = Decoder(target, sampling=sampling, slots=slots or needed, batch=batch_rows)
        stops = target.eos_ids if eos_ids is None else eos_ids
        keys = [row_ids[index] for index in indices] if row_ids else indices
        generations = decoder.decode(batch_prompts, row_ids=keys, max_new_tokens=batch_limits, eos_ids=stops)
        yield from ((index, generation.ids) for index, generation in zip(indices, generations, strict=True))
