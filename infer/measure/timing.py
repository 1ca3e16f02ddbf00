"""Where the time of a round goes, what that predicts, and what holds the speed-up back."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.progress import track

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.phase_timer import Laps
from infer.measure.eval_modes import Contender
from infer.measure.records import Costs
from infer.measure.results import Split

PASSES = 2  # over the prompts that are timed
FEWEST = 4  # tokens that warm an unfused round up


@dataclass(kw_only=True)
class _Clocks:
    """Of one mode: its unfused rounds in parts, its fused rounds whole."""

    laps: Laps
    fused_s: float = 0.0
    rounds: int = 0


def in_turns(names: Sequence[str], number: int) -> list[str]:
    """There and back, then from another first: slow drift cancels (ABBA).

    >>> [in_turns("abc", number) for number in range(3)]
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a']]
    """
    turn = number // 2 % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned[:: -1 if number % 2 else 1]


def splits(
    modes: dict[str, Contender], prompts: list[EvalPrompt], *, max_new_tokens: int
) -> dict[str, Split]:
    """The parts of each timed mode's rounds, on some prompts decoded again, in turns.

    The unfused round is taken apart. Where rounds are fused, one of each kind is decoded after the
    other, and the whole fused round stands beside the parts.
    """
    timed = {name: mode for name, mode in modes.items() if mode.timed}
    some = list({prompt.category: prompt for prompt in prompts}.values())
    clocks = {
        name: _Clocks(laps=Laps(synchronize=mode.decoder.synchronize))
        for name, mode in timed.items()
    }
    warm_unfused(timed.values(), some[0], max_new_tokens=max_new_tokens)
    for number in _progress(range(PASSES * len(some)), "timing rounds"):
        prompt = some[number // PASSES]
        for name in in_turns(list(timed), number):
            clock, mode = clocks[name], timed[name]
            kinds = [clock.laps, None] if mode.decoder.fused else [clock.laps]
            for laps in kinds[:: -1 if number % 2 else 1]:
                count = _decode(mode, prompt, max_new_tokens, laps)
                if laps is None:
                    clock.rounds += count
                    clock.fused_s += mode.decoder.spent.round_s
    return {name: _split(clock) for name, clock in clocks.items()}


def warm_unfused(modes: Iterable[Contender], prompt: EvalPrompt, *, max_new_tokens: int) -> None:
    """Compile the parts of their rounds."""
    for mode in _progress(list(modes), "warming up unfused rounds"):
        laps = Laps(synchronize=mode.decoder.synchronize)
        with mode.decoder.target.device.ledger.warming():
            _decode(mode, prompt, min(FEWEST, max_new_tokens), laps)


def costs(modes: dict[str, Contender], parts: dict[str, Split]) -> dict[str, Costs]:
    """Seconds of a draft and a verify pass of each mode with a draft, and of a plain step."""
    return {
        name: Costs(
            draft_s=split.draft_s,
            verify_s=split.verify_s + split.accept_s + split.cache_move_s,
            step_s=parts[modes[name].baseline].verify_s + parts[modes[name].baseline].accept_s,
        )
        for name, split in parts.items()
        if modes[name].decoder.draft is not None
    }


def bottleneck(split: Split, plain: Split, acceptance_length: float) -> str:
    """What holds the speed-up back, in one sentence: the parts in autoregressive steps.

    With a step for verifying and nothing else the speed-up would be the acceptance length.
    """
    step = plain.verify_s + plain.accept_s
    beyond = {
        "verifying more than a token": split.verify_s / step - plain.verify_s / step,
        "drafting": split.draft_s / step,
        "accepting": (split.accept_s - plain.accept_s) / step,
        "moving the cache": split.cache_move_s / step,
        "the host": split.host_s / step,
    }
    dear, *others = sorted(beyond.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {steps:.2f}" for name, steps in others)
    return (
        f"{dear[0].capitalize()} holds it back most: a round gives {acceptance_length:.2f} tokens "
        f"and takes one autoregressive step and {dear[1]:.2f} of another for that; {listed}."
    )


def _decode(mode: Contender, prompt: EvalPrompt, count: int, laps: Laps | None) -> int:
    """Rounds that were needed. No answer ends early, so that every mode has some."""
    (done,) = mode.decoder.decode(
        [prompt.ids], row_ids=[prompt.row_id], max_new_tokens=count, laps=laps
    )
    return len(done.round_s)


def _split(clock: _Clocks) -> Split:
    laps = clock.laps
    rounds = max(1, laps.rounds)
    return Split(
        **{f"{part}_s": seconds / rounds for part, seconds in laps.seconds.items()},
        round_s=laps.wall_s / rounds,
        fused_round_s=clock.fused_s / clock.rounds if clock.rounds else None,
    )


def _progress(items: Sequence, what: str) -> Iterator:
    return iter(track(items, what, disable=not sys.stderr.isatty()))
