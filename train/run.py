"""Start or continue a run: claim its folder, load its progress, decide how many steps it takes.

The folder is checked before anything slow. A full disk is reported in one line, at any time.

A run can continue with a different number of steps than it was started with, from a saved state
whose learning rates so far are also those of a run started with the new number. With a constant
rate that is the newest state, with wsd the state kept from before the decay. With cosine, whose
rate falls from the warm-up on, there is no such state.
"""

import errno
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from conf.entry import config_to_yaml
from models.drafts.base import Draft
from models.errors import UserError, require
from models.files import report_disk_errors
from models.lock import acquire_lock
from models.saved_states import find_newest_state, read_progress_file
from models.target.target import Target
from train.config.optim import DEFAULT_STEPS, LearningRate, OptimConf, Schedule
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.distributed.torchrun import is_restart
from train.state import RunState, flatten_config, remove_state

LEASE_S = 180.0  # longer than NFSv4 keeps the lock of a node that vanished: 90 s, and 90 s of grace
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch and safetensors write from C++ and Rust, whose errors give the reason only in their text:
# torch reports a short write as `unexpected pos`.
DISK_FULL_MESSAGES = (
    "no space left",
    "quota exceeded",
    "file too large",
    "unexpected pos",
    "write failed",
)
REPORT_FILES = ("report.json", "report.md", "report.html", "rounds.jsonl")
RUN_FILES = (
    "metrics.jsonl", *REPORT_FILES, "training_prompts.npy", "held_out.jsonl",
    "selection.jsonl", "vocabulary.md", "config.yaml",
)  # fmt: skip
log = logging.getLogger(__name__)


def open_run(conf: TrainConf, parallel: Parallel) -> RunState:
    """Claim the run's folder and return its state with the progress loaded; collective.

    The main process locks the folder, empties it if the run is started over, removes outdated
    states and writes config.yaml. Raise UserError if the folder cannot be used, or if the run
    cannot continue with this config.
    """
    folder = Path(conf.output_dir) / conf.run_name
    create_run_dir(folder)
    if parallel.is_main:  # before any file of a run in progress is read or removed
        acquire_lock(folder, timeout_s=LEASE_S if is_restart() else 0.0)
    # Each node's launcher counts its own restarts, and restarts when another node's worker dies.
    if not conf.resume and not parallel.any_rank(is_restart()) and parallel.is_main:
        reset_run_dir(folder)
    parallel.barrier()
    state = RunState(
        folder, flatten_config(conf) | {"device.route": parallel.accelerator.device.type}
    )
    state.load_progress()
    check_same_step(state, parallel)
    if state.progress.step:
        # Called for its UserError: if the run cannot be extended whatever its number of rows, that
        # is reported before a model is loaded.
        steps = known_steps(state, conf.optim)
        find_resume_state(state, conf.optim, steps, multiple=conf.renewal_interval)
        log.info("%s continues after step %d", folder, state.progress.step)
    parallel.barrier()
    if parallel.is_main:
        state.remove_old_states()
        (folder / "config.yaml").write_text(config_to_yaml(conf))
    return state


def read_saved_value(folder: Path, key: str) -> Any:
    """Return a value of the config of the run's newest state, or None if nothing is saved."""
    newest = find_newest_state(folder)
    return read_progress_file(newest)["config"].get(key) if newest else None


def check_same_step(state: RunState, parallel: Parallel) -> None:
    """Check that all processes would continue after the same step; raise UserError on each if not.

    A network file system may show a node an outdated folder.
    """
    step = state.progress.step
    require(
        parallel.all_ranks_agree(step),
        f"output_dir: must show every process the same states, got step {step} here and "
        f"a different one elsewhere in {state.states_dir}; start again, or use a file system "
        "that all share",
    )


def known_steps(state: RunState, optim: OptimConf) -> int | None:
    """Return the steps of the whole run, or None if they depend on the number of rows."""
    if optim.epochs is None:
        return optim.steps or DEFAULT_STEPS
    is_same = state.saved_config.get("optim.epochs") == optim.epochs
    return state.progress.steps if is_same else None


def find_resume_state(
    state: RunState, optim: OptimConf, steps: int | None, *, multiple: int
) -> Path | None:
    """Return the state from which the run continues to `steps`, or None if nothing is saved.

    Raise UserError if the run cannot be extended to `steps`. None, while the rows are not counted
    yet, returns the newest state, but is an error with cosine, which allows no other number. Only
    multiples of `multiple` serve an extension: on-policy rows are rewritten at these steps.
    """
    progress, is_cosine = state.progress, optim.schedule is Schedule.cosine
    if not progress.step or steps == progress.steps or (steps is None and not is_cosine):
        return state.newest_state()
    if steps is None or is_cosine or steps <= progress.step:
        raise _extension_error(state, optim, steps)
    old = _saved_learning_rate(state, optim)
    new = optim.learning_rate(steps, warmup_steps=old.warmup_steps)
    for path in sorted(state.complete_states(), reverse=True):
        num_rates = int(path.name) + 1  # the state also contains the rate of the step after it
        same_rates = all(old.factor(step) == new.factor(step) for step in range(num_rates))
        if same_rates and int(path.name) % multiple == 0:
            return path
    raise _extension_error(state, optim, steps)


def set_total_steps(
    state: RunState, optim: OptimConf, parallel: Parallel, *, rows: int, multiple: int
) -> LearningRate:
    """Set the run's number of steps, and return its learning rate; collective.

    A run that is extended is rewound to the state that it continues from: later states and the
    report are removed. Raise UserError if it cannot be extended.
    """
    progress = state.progress
    steps = known_steps(state, optim) or optim.total_steps(rows)
    path = find_resume_state(state, optim, steps, multiple=multiple)
    warmup_steps = progress.warmup_steps
    if path is not None and steps != progress.steps:
        log.info(
            "extended from %s to %d steps, from step %d", progress.steps, steps, int(path.name)
        )
        warmup_steps = _saved_learning_rate(state, optim).warmup_steps
        state.rewind_to(path, parallel)
        if parallel.is_main:
            for name in REPORT_FILES:  # they describe a draft that is no longer the run's last
                (state.folder / name).unlink(missing_ok=True)
    rate = optim.learning_rate(steps, warmup_steps=warmup_steps)
    state.progress.steps, state.progress.warmup_steps = steps, rate.warmup_steps
    return rate


def _saved_learning_rate(state: RunState, optim: OptimConf) -> LearningRate:
    """Return the learning rate schedule of the run up to its newest state."""
    assert state.progress.steps is not None
    return optim.learning_rate(state.progress.steps, warmup_steps=state.progress.warmup_steps)


def _extension_error(state: RunState, optim: OptimConf, new_steps: int | None) -> UserError:
    """Build the UserError of a run that cannot be extended to `new_steps` (None: not known yet)."""
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


def create_run_dir(folder: Path) -> None:
    """Create the run folder; raise UserError if it is not writable."""
    with report_disk_errors(folder, remedy="choose another"), report_full_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))


def reset_run_dir(folder: Path) -> None:
    """Remove the files of an earlier run of this name.

    Its states go first, by one rename, so that a kill leaves either all of them or none.
    """
    remove_state(folder / "state")
    if (folder / "checkpoint").exists():
        shutil.rmtree(folder / "checkpoint")
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)


def check_disk_space(
    folder: Path, draft: Draft, target: Target | None = None, *, num_states: int = 2
) -> None:
    """Raise UserError if the disk lacks space for the files of a run.

    The parameters are those of `disk_bytes_needed`.
    """
    needed = disk_bytes_needed(draft, target, num_states=num_states)
    free = shutil.disk_usage(folder).free
    require(
        free >= needed,
        f"output_dir: needs {needed / 1e9:.2f} GB of free disk space for this draft, "
        f"got {free / 1e9:.2f} GB in {folder}; free some space or choose another output_dir",
    )


def disk_bytes_needed(draft: Draft, target: Target | None = None, *, num_states: int = 2) -> int:
    """Return the bytes of `num_states` states and of two checkpoints.

    A new state or checkpoint is complete before the old one is removed, so there are at least two
    of each. A state holds the trained weights and their two moments. `target` is needed for a draft
    that adapts it, whose checkpoint includes the adapted target.
    """
    needed = 2 * sum(p.nbytes for p in draft.parameters())
    needed += num_states * 3 * sum(p.nbytes for p in trained_parameters(draft))
    if target is not None and (adapted := draft.get_adapted_target(target)) is not None:
        # Its only trained parameters are adapters, which are merged when it is written.
        needed += 2 * sum(p.nbytes for p in adapted.model.parameters() if not p.requires_grad)
    return needed


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Turn errors of a full disk, raised in the block, into a one-line UserError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        is_full = any(message in str(error).lower() for message in DISK_FULL_MESSAGES)
        if getattr(error, "errno", None) not in DISK_FULL_ERRNOS and not is_full:
            raise
        raise UserError(
            f"output_dir: the disk is full, got {folder}; free some space and start the "
            "same command again: it continues from the last state"
        ) from error
