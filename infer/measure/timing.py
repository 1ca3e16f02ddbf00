"""Measure the phases of a round, one after the other, beside the round as one graph."""

from collections.abc import Iterable
from functools import partial

from data.eval_prompts.prompts import EvalPrompt
from infer.engine.phase_timer import PhaseTimer
from infer.measure.bench import WARMUP_TOKENS, DecodePrompts, decode_in_turns, decode_prompts
from infer.measure.eval_modes import EvalMode
from infer.results.records import PromptResult
from infer.results.schema import RoundSplit
from models.io.console import track_progress

PASSES_PER_PROMPT = 2


def measure_splits(
    modes: dict[str, EvalMode], prompts: list[EvalPrompt], *, max_new_tokens: int
) -> dict[str, RoundSplit]:
    """Return the times of each timed mode's phases, measured on one prompt of each category.

    Every mode decodes each prompt with unfused rounds, whose phases are timed, and with fused ones.
    End tokens are ignored, so that every mode has rounds to time.
    """
    timed = {name: mode.decoder for name, mode in modes.items() if mode.timed}
    by_category = {prompt.category: prompt for prompt in prompts}
    turns = [[prompt] for prompt in by_category.values() for _ in range(PASSES_PER_PROMPT)]
    timers = {name: PhaseTimer(synchronize=decoder.target.device.synchronize) for name, decoder in timed.items()}
    warm_up_unfused([modes[name] for name in timed], turns[0][0], max_new_tokens=max_new_tokens)
    runs: dict[str, DecodePrompts] = {}
    for name, decoder in timed.items():
        decode = partial(decode_prompts, decoder, max_new_tokens=max_new_tokens, stops_at_eos=False)
        runs |= {f"unfused {name}": partial(decode, phase_timer=timers[name]), name: decode}
    results = decode_in_turns(runs, turns, "timing rounds")
    return {name: _build_split(timers[name], results[name]) for name in timed}


def warm_up_unfused(modes: Iterable[EvalMode], prompt: EvalPrompt, *, max_new_tokens: int) -> None:
    """Compile the phases of the modes' unfused rounds."""
    tokens = min(WARMUP_TOKENS, max_new_tokens)
    for mode in track_progress(list(modes), "warming up unfused rounds"):
        decoder, device = mode.decoder, mode.decoder.target.device
        with device.ledger.warming():
            timer = PhaseTimer(synchronize=device.synchronize)
            decode_prompts(decoder, [prompt], max_new_tokens=tokens, stops_at_eos=False, phase_timer=timer)


def _build_split(timer: PhaseTimer, fused: list[PromptResult]) -> RoundSplit:
    rounds = max(1, timer.rounds)
    fused_s = [seconds for result in fused for seconds in result.generation.round_s]
    return RoundSplit(
        **{phase: 1000 * seconds / rounds for phase, seconds in timer.seconds.items()},
        round=1000 * timer.wall_s / rounds,
        fused_round=1000 * sum(fused_s) / len(fused_s) if fused_s else None,
    )
