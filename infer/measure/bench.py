"""Decode prompts in several modes in turns: for an evaluation, its batches and phases, the tuner.

In each turn every mode decodes the same prompts, and the order of the modes alternates, so that a
machine that becomes slower or faster affects all of them alike.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.admission import bucket_length
from infer.engine.decode import Decoder
from infer.engine.phase_timer import PhaseTimer
from infer.engine.requests import Generation
from infer.results.records import PromptResult
from models.io.console import track_progress

MIN_TURNS = 4  # two prompts, decoded twice: a standard error needs two
WARMUP_TOKENS = 4  # enough for a round, which compiles all graphs of an answer

T = TypeVar("T")
DecodePrompts = Callable[[list[EvalPrompt]], list[Generation]]


def decode_prompts(
    decoder: Decoder,
    prompts: list[EvalPrompt],
    *,
    max_new_tokens: int,
    stops_at_eos: bool = True,
    phase_timer: PhaseTimer | None = None,
) -> list[Generation]:
    """Decode prompts to `max_new_tokens`, with `stops_at_eos` to the end of their answers."""
    return decoder.decode(
        [prompt.ids for prompt in prompts],
        row_ids=[prompt.row_id for prompt in prompts],
        max_new_tokens=max_new_tokens,
        phase_timer=phase_timer,
        eos_ids=decoder.target.eos_ids if stops_at_eos else None,
    )


def decode_in_turns(
    modes: dict[str, DecodePrompts],
    turns: Sequence[list[EvalPrompt]],
    title: str,
    *,
    has_time: Callable[[], bool] = lambda: True,
) -> dict[str, list[PromptResult]]:
    """Decode each turn in every mode before the next; return the results of each mode in the order of the turns.

    At least MIN_TURNS are decoded, and no more once `has_time` is false.
    """
    results: dict[str, list[PromptResult]] = {name: [] for name in modes}
    for number, prompts in enumerate(track_progress(turns, title)):
        if number >= MIN_TURNS and not has_time():
            break
        for name in alternate_order(list(modes), number):
            results[name] += [
                PromptResult(prompt=prompt, generation=generation)
                for prompt, generation in zip(prompts, modes[name](prompts), strict=True)
            ]
    return results


def alternate_order(names: Sequence[T], number: int) -> list[T]:
    """Return the order of the modes in repetition `number`, in which slow drift cancels.

    The order is reversed every other time (ABBA), and each pair begins with the next mode.

    >>> [alternate_order("abc", number) for number in range(3)]
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a']]
    """
    offset = number // 2 % len(names)
    rotated = [*names[offset:], *names[:offset]]
    return rotated[:: -1 if number % 2 else 1]


def bind_decoders(decoders: dict[str, Decoder], *, max_new_tokens: int) -> dict[str, DecodePrompts]:
    """Return by name what decodes prompts to the end of their answers."""
    return {name: partial(decode_prompts, decoder, max_new_tokens=max_new_tokens) for name, decoder in decoders.items()}


def choose_warmup_prompts(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Return one prompt of each padded length and one of each category, to warm up with."""
    return [*{bucket_length(len(p.ids)): p for p in prompts}.values(), *{p.category: p for p in prompts}.values()]
