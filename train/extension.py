"""Continue a run with another number of steps than it was started with.

A saved state serves the new number if the learning rate was, up to that state, what a run of the
new number would have had from its beginning. With a constant rate that is the newest state, with
wsd the one kept from before its decay, and with cosine, which falls from its warm-up on, none.
"""

import logging
from pathlib import Path

from models.errors import UserError
from train.distributed.parallel import Parallel
from train.optim import DEFAULT_STEPS, LearningRate, OptimConf, Schedule
from train.run_dir import REPORTS
from train.state import State

log = logging.getLogger(__name__)


def known_steps(state: State, optim: OptimConf) -> int | None:
    """Return the steps of the whole run, or None where only the number of rows can tell."""
    if optim.epochs is None:
        return optim.steps or DEFAULT_STEPS
    same = state.started.get("optim.epochs") == optim.epochs
    return state.progress.steps if same else None


def refuse_early(state: State, optim: OptimConf, *, multiple: int) -> None:
    """Refuse before a model is loaded what the number of rows would not change."""
    steps = known_steps(state, optim)
    if steps is not None:
        find_state(state, optim, steps, multiple=multiple)
    elif state.progress.step and optim.schedule is Schedule.cosine:
        raise _refusal(state, optim, None)


def find_state(state: State, optim: OptimConf, steps: int, *, multiple: int) -> Path | None:
    """Return the state to continue from to `steps`; None for a run that has none.

    Raises UserError where no state serves. On-policy rows are rewritten every `multiple` steps,
    and a run continues from such a step alone.
    """
    progress = state.progress
    if not progress.step or steps == progress.steps:
        return state.newest()
    old = _rate(state, optim)
    new = optim.learning_rate(steps, warmup_steps=old.warmup_steps)
    if optim.schedule is not Schedule.cosine and steps > progress.step:
        for place in sorted(state.complete(), reverse=True):
            done = int(place.name)
            # The rate of the step after it is part of the state as well.
            same = all(old.factor(step) == new.factor(step) for step in range(done + 1))
            if same and done % multiple == 0:
                return place
    raise _refusal(state, optim, steps)


def set_goal(
    state: State, optim: OptimConf, parallel: Parallel, *, rows: int, multiple: int
) -> LearningRate:
    """Decide how many steps the run has, and go back to the state that it continues from."""
    steps, progress = known_steps(state, optim) or optim.total_steps(rows), state.progress
    place = find_state(state, optim, steps, multiple=multiple)
    warmup_steps = progress.warmup_steps
    if place is not None and steps != progress.steps:
        log.info(
            "extended from %s to %d steps, from step %d", progress.steps, steps, int(place.name)
        )
        warmup_steps = _rate(state, optim).warmup_steps
        state.go_back(place, parallel)
        if parallel.main:
            for name in REPORTS:  # of a draft that is not the run's last any more
                (state.folder / name).unlink(missing_ok=True)
    rate = optim.learning_rate(steps, warmup_steps=warmup_steps)
    state.progress.steps, state.progress.warmup_steps = steps, rate.warmup_steps
    return rate


def _rate(state: State, optim: OptimConf) -> LearningRate:
    """Return the learning rate with which the newest state was learned."""
    progress = state.progress
    assert progress.steps is not None
    return optim.learning_rate(progress.steps, warmup_steps=progress.warmup_steps)


def _refusal(state: State, optim: OptimConf, wanted: int | None) -> UserError:
    """`wanted`: the steps of the run, where they are known."""
    progress, other = state.progress, "use another run_name or resume=false"
    key, before, got = "optim.steps", progress.steps, f"{wanted}"
    if optim.epochs is not None:
        key, before = "optim.epochs", state.started.get("optim.epochs")
        got = f"{optim.epochs}" + (f" ({wanted} steps)" if wanted else "")
    if optim.schedule is Schedule.cosine:
        return UserError(
            f"{key}: must stay {before} with optim.schedule=cosine, whose rate falls to the last "
            f"step, got {got}; {other}, and optim.schedule=wsd or constant for a run to be extended"
        )
    if wanted is not None and wanted <= progress.step:
        return UserError(f"{key}: must be above the {progress.step} steps done, got {got}; {other}")
    kept = ", ".join(str(int(place.name)) for place in sorted(state.complete()))
    return UserError(
        f"{key}: the rates up to a saved state (step {kept}) must be those of the new run, got "
        f"{got} after {before}; give more steps, or {other}"
    )
