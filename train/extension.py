"""Continue a run with a different number of steps than it was started with.

A saved state serves the new number if the learning rate up to that state was what a run of the new
number would have had from its beginning. With a constant rate that is the newest state, with wsd
the state kept from before the decay. With cosine, which falls from the warm-up on, no state serves.
"""

import logging
from pathlib import Path

from models.errors import UserError
from train.distributed.parallel import Parallel
from train.optim import DEFAULT_STEPS, LearningRate, OptimConf, Schedule
from train.run_dir import REPORT_FILES
from train.state import RunState

log = logging.getLogger(__name__)


def known_steps(state: RunState, optim: OptimConf) -> int | None:
    """Return the steps of the whole run, or None where they depend on the number of rows."""
    if optim.epochs is None:
        return optim.steps or DEFAULT_STEPS
    same = state.saved_config.get("optim.epochs") == optim.epochs
    return state.progress.steps if same else None


def check_extension(state: RunState, optim: OptimConf, *, multiple: int) -> None:
    """Reject, before a model is loaded, an extension that fails for any number of rows."""
    steps = known_steps(state, optim)
    if steps is not None:
        find_resume_state(state, optim, steps, multiple=multiple)
    elif state.progress.step and optim.schedule is Schedule.cosine:
        raise _extension_error(state, optim, None)


def find_resume_state(
    state: RunState, optim: OptimConf, steps: int, *, multiple: int
) -> Path | None:
    """Return the state from which the run continues to `steps`, or None if it has no state.

    Raises UserError if no state serves. On-policy rows are rewritten every `multiple` steps, and a
    run can continue only from such a step.
    """
    progress = state.progress
    if not progress.step or steps == progress.steps:
        return state.newest_state()
    old = _saved_learning_rate(state, optim)
    new = optim.learning_rate(steps, warmup_steps=old.warmup_steps)
    if optim.schedule is not Schedule.cosine and steps > progress.step:
        for path in sorted(state.complete_states(), reverse=True):
            done = int(path.name)
            # The state also contains the rate of the step after it.
            same = all(old.factor(step) == new.factor(step) for step in range(done + 1))
            if same and done % multiple == 0:
                return path
    raise _extension_error(state, optim, steps)


def set_total_steps(
    state: RunState, optim: OptimConf, parallel: Parallel, *, rows: int, multiple: int
) -> LearningRate:
    """Set the number of steps of the run, and rewind to the state that it continues from."""
    steps, progress = known_steps(state, optim) or optim.total_steps(rows), state.progress
    path = find_resume_state(state, optim, steps, multiple=multiple)
    warmup_steps = progress.warmup_steps
    if path is not None and steps != progress.steps:
        log.info(
            "extended from %s to %d steps, from step %d", progress.steps, steps, int(path.name)
        )
        warmup_steps = _saved_learning_rate(state, optim).warmup_steps
        state.rewind_to(path, parallel)
        if parallel.is_main:
            for name in REPORT_FILES:  # of a draft that is not the run's last any more
                (state.folder / name).unlink(missing_ok=True)
    rate = optim.learning_rate(steps, warmup_steps=warmup_steps)
    state.progress.steps, state.progress.warmup_steps = steps, rate.warmup_steps
    return rate


def _saved_learning_rate(state: RunState, optim: OptimConf) -> LearningRate:
    """Return the learning rate schedule of the run up to its newest state."""
    progress = state.progress
    assert progress.steps is not None
    return optim.learning_rate(progress.steps, warmup_steps=progress.warmup_steps)


def _extension_error(state: RunState, optim: OptimConf, new_steps: int | None) -> UserError:
    """Build the error of a run that cannot get `new_steps` (None: not known yet)."""
    progress, restart = state.progress, "use another run_name or resume=false"
    key, before, got = "optim.steps", progress.steps, f"{new_steps}"
    if optim.epochs is not None:
        key, before = "optim.epochs", state.saved_config.get("optim.epochs")
        got = f"{optim.epochs}" + (f" ({new_steps} steps)" if new_steps else "")
    if optim.schedule is Schedule.cosine:
        return UserError(
            f"{key}: must stay {before} with optim.schedule=cosine, whose rate falls to the last "
            f"step, got {got}; {restart}, and optim.schedule=wsd or constant for a run to be "
            "extended"
        )
    if new_steps is not None and new_steps <= progress.step:
        return UserError(
            f"{key}: must be above the {progress.step} steps done, got {got}; {restart}"
        )
    saved_steps = ", ".join(str(int(path.name)) for path in sorted(state.complete_states()))
    return UserError(
        f"{key}: the rates up to a saved state (step {saved_steps}) must be those of the new run, "
        f"got {got} after {before}; give more steps, or {restart}"
    )
