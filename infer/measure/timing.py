"""Measure the phases of a round, and derive costs and the bottleneck of a mode from them."""

from collections.abc import Iterable, Sequence

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.phase_timer import PhaseTimer
from infer.measure.eval_modes import EvalMode
from infer.measure.report_schema import RoundCosts, RoundSplit
from models.console import track_progress

PASSES_PER_PROMPT = 2
WARMUP_TOKENS = 4  # tokens decoded to warm up unfused rounds


def alternate_order(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the modes in repetition `number`, in which slow drift cancels.

    The order is reversed every other time (ABBA), and each pair begins with the next mode.

    >>> [alternate_order("abc", number) for number in range(3)]
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a']]
    """
    offset = number // 2 % len(names)
    rotated = [*names[offset:], *names[:offset]]
    return rotated[:: -1 if number % 2 else 1]


def measure_splits(
    modes: dict[str, EvalMode], prompts: list[EvalPrompt], *, max_new_tokens: int
) -> dict[str, RoundSplit]:
    """Return the times of each timed mode's phases, measured on one prompt of each category.

    The phases are those of unfused rounds. Each prompt is decoded with both kinds of rounds in
    succession, and the result also holds the time of the whole fused round.
    """
    timed_modes = {name: mode for name, mode in modes.items() if mode.timed}
    timed_prompts = list({prompt.category: prompt for prompt in prompts}.values())
    timers = {
        name: PhaseTimer(synchronize=mode.decoder.synchronize) for name, mode in timed_modes.items()
    }
    fused_s: dict[str, list[float]] = {name: [] for name in timed_modes}
    warm_up_unfused(timed_modes.values(), timed_prompts[0], max_new_tokens=max_new_tokens)
    for number in track_progress(range(PASSES_PER_PROMPT * len(timed_prompts)), "timing rounds"):
        prompt = timed_prompts[number // PASSES_PER_PROMPT]
        for name in alternate_order(list(timed_modes), number):
            # With None, rounds run fused.
            phase_timers = [timers[name], None]
            for phase_timer in phase_timers[:: -1 if number % 2 else 1]:
                round_s = _time_rounds(timed_modes[name], prompt, max_new_tokens, phase_timer)
                if phase_timer is None:
                    fused_s[name] += round_s
    return {name: _build_split(timers[name], fused_s[name]) for name in timed_modes}


def warm_up_unfused(modes: Iterable[EvalMode], prompt: EvalPrompt, *, max_new_tokens: int) -> None:
    """Compile the phases of the modes' unfused rounds."""
    for mode in track_progress(list(modes), "warming up unfused rounds"):
        phase_timer = PhaseTimer(synchronize=mode.decoder.synchronize)
        with mode.decoder.target.device.ledger.warming():
            _time_rounds(mode, prompt, min(WARMUP_TOKENS, max_new_tokens), phase_timer)


def derive_costs(
    modes: dict[str, EvalMode], splits: dict[str, RoundSplit]
) -> dict[str, RoundCosts]:
    """Return the costs of each mode with a draft: a draft and a verify pass, and a plain step."""
    costs = {}
    for name, split in splits.items():
        draft, depth = modes[name].decoder.draft, modes[name].decoder.tree.depth
        if draft is not None:
            costs[name] = RoundCosts(
                draft=split.draft,
                verify=split.verify + split.accept + split.cache_move,
                autoregressive_step=splits[modes[name].baseline].plain_step,
                level=split.draft / depth if draft.passes(depth) else None,
            )
    return costs


def describe_bottleneck(split: RoundSplit, baseline: RoundSplit, acceptance_length: float) -> str:
    """Return a sentence on what limits the speed-up most; costs are in autoregressive steps.

    A round that cost just one such step would make the speed-up equal to the acceptance length.
    """
    step = baseline.plain_step
    extra_steps = {
        "verifying more than one token": (split.verify - baseline.verify) / step,
        "drafting": split.draft / step,
        "accepting": (split.accept - baseline.accept) / step,
        "moving the cache": split.cache_move / step,
        "the host": split.host / step,
    }
    largest, *others = sorted(extra_steps.items(), key=lambda phase: -phase[1])
    listed = ", ".join(f"{name} {steps:.2f}" for name, steps in others)
    return (
        f"{largest[0].capitalize()} limits the speed-up most: a round yields "
        f"{acceptance_length:.2f} tokens and costs one autoregressive step plus {largest[1]:.2f} "
        f"steps for this; other extra costs, in steps: {listed}."
    )


def _time_rounds(
    mode: EvalMode, prompt: EvalPrompt, max_new_tokens: int, phase_timer: PhaseTimer | None
) -> list[float]:
    """Decode a prompt and return the seconds of its rounds.

    End tokens are ignored, so that every mode has rounds to time.
    """
    (generation,) = mode.decoder.decode(
        [prompt.ids],
        row_ids=[prompt.row_id],
        max_new_tokens=max_new_tokens,
        phase_timer=phase_timer,
    )
    return generation.round_s


def _build_split(timer: PhaseTimer, fused_s: list[float]) -> RoundSplit:
    rounds = max(1, timer.rounds)
    return RoundSplit(
        **{phase: 1000 * seconds / rounds for phase, seconds in timer.seconds.items()},
        round=1000 * timer.wall_s / rounds,
        fused_round=1000 * sum(fused_s) / len(fused_s) if fused_s else None,
    )
