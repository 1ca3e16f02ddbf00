"""The folder of a run: claimed by one process, started over, continued, and its room on the disk.

Lock and states are checked before anything slow, the room on the disk when the draft is built.
"""

import errno
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from conf.entry import config_to_yaml
from models.checkpoints.saved_states import REPLACED_FOLDER, STATES_FOLDER, find_newest_state
from models.drafts.base import Draft
from models.io.errors import UserError, require
from models.io.files import PARTIAL_SUFFIX, report_disk_errors
from models.io.lock import acquire_lock
from models.parallel.torchrun import identify_launch, is_restart
from models.targets.target import Target
from models.trees.config import TUNED
from train.config.optim import OptimConf
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.optim import trained_parameters
from train.run.state import RunState, flatten_config

LEASE_S = 180.0  # longer than NFSv4 keeps the lock of a node that vanished: 90 s, and 90 s of grace
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# torch and safetensors write from C++ and Rust, whose errors give the reason only in their text:
# torch reports a short write as `unexpected pos`.
DISK_FULL_MESSAGES = ("no space left", "quota exceeded", "file too large", "unexpected pos", "write failed")
REPORT_FILES = ("report.json", "report.md", "report.html", "rounds.jsonl")
PROMPT_FILES = ("training_prompts.npy", "held_out.jsonl", "selection.jsonl")
LAUNCH_FILE = "launch"  # that started the run over
CARD_FILE = "README.md"  # of the checkpoint: the name under which the hub shows a card
OTHER_FILES = ("metrics.jsonl", "vocabulary.md", "config.yaml")
log = logging.getLogger(__name__)


def open_run(conf: TrainConf, parallel: Parallel) -> RunState:
    """Claim the run's folder and return its state with the progress loaded; collective.

    The main process locks the folder, moves its files aside if the run is started over, and removes outdated states.
    Raise UserError if the folder cannot be used, or if the run cannot continue with this config.
    """
    folder = Path(conf.output_dir) / conf.run_name
    with report_disk_errors(folder, remedy="choose another"), report_full_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    if parallel.is_main:  # before any file of a run in progress is read or removed
        acquire_lock(folder, timeout_s=LEASE_S if is_restart() else 0.0)
        if not conf.resume:
            start_over(folder)
    parallel.barrier()
    state = RunState(folder, flatten_config(conf) | {"device.route": parallel.accelerator.device.type})
    state.load_progress()
    check_same_step(state, parallel)
    check_steps(state, conf.optim)
    if state.progress.step:
        log.info("%s continues after step %d", folder, state.progress.step)
    parallel.barrier()
    if parallel.is_main:
        state.remove_old_states()
    parallel.barrier()  # nobody lists the folder while old states are removed
    return state


def replace_outdated_files(state: RunState, conf: TrainConf) -> None:
    """Write config.yaml, and remove report and card of a draft that is trained further, once nothing can refuse it."""
    if state.progress.step < state.progress.steps:
        for file in [*list_report_files(state.folder), state.folder / "checkpoint" / CARD_FILE]:
            file.unlink(missing_ok=True)
    (state.folder / "config.yaml").write_text(config_to_yaml(conf))


def check_same_step(state: RunState, parallel: Parallel) -> None:
    """Raise UserError on all processes if a network file system shows one an outdated folder, so another step."""
    step = state.progress.step
    require(
        len(set(parallel.gather(step))) == 1,
        f"output_dir: must show every process the same states, got step {step} here and a different one elsewhere in "
        f"{state.states_dir}; start again, or use a file system that all share",
    )


def check_steps(state: RunState, optim: OptimConf) -> None:
    """Set the number of steps of a continued run, which may differ while the rate is at its peak.

    That is so with a constant rate and, before its decay, with wsd: the saved state suits both
    numbers. Raise UserError otherwise.
    """
    progress = state.progress
    if not progress.step:
        return
    steps = optim.total_steps(progress.num_rows)
    factors = [optim.rate_factor(progress.step, n) for n in (progress.steps, steps)]
    require(
        steps == progress.steps or (steps > progress.step and factors == [1.0, 1.0]),
        f"optim.{'steps' if optim.epochs is None else 'epochs'}: must stay as it was ({progress.steps} steps) once "
        f"{progress.step} steps are done, unless the rate is at its peak before and after (constant, or wsd before its "
        f"decay), got {steps} steps; use another run_name",
    )
    if steps != progress.steps:
        log.info("optim: the run goes on to step %d instead of %d", steps, progress.steps)
    progress.steps = steps


def start_over(folder: Path) -> None:
    """Move an earlier run aside, once for a launch: its restarts go on, and so does a job that its cluster requeued."""
    file, launch = folder / LAUNCH_FILE, identify_launch()
    if file.exists() and file.read_text() == launch:
        log.info(
            "resume=false: this launch, %s, has started %s over already, so the run goes on; another --rdzv-id or "
            "DRAFTSMITH_LAUNCH starts it over again",
            launch,
            folder,
        )
        return
    reset_run_dir(folder)
    file.write_text(launch)


def reset_run_dir(folder: Path) -> None:
    """Move the files of an earlier run aside, where they stay until this run saves a state.

    First go its states, by one rename; what a kill has left is moved by the next call. A run that is aside is replaced
    by one with a state alone: one without has learned less.
    """
    aside = folder / REPLACED_FOLDER
    partial = folder / f"{REPLACED_FOLDER}{PARTIAL_SUFFIX}"
    files = [folder / name for name in (STATES_FOLDER, "checkpoint", *PROMPT_FILES, *OTHER_FILES)]
    files = [file for file in files if file.exists()] + list_report_files(folder)
    if aside.exists() and find_newest_state(folder) is None and not partial.exists():
        remove_files(files)
        return
    if not files:
        return
    partial.mkdir(exist_ok=True)
    remove_files([file for file in files if (partial / file.name).exists()])  # those moved before have learned more
    for file in files:
        if file.exists():
            file.rename(partial / file.name)
    shutil.rmtree(aside, ignore_errors=True)
    partial.rename(aside)
    log.info("resume=false: the earlier run is kept in %s until this one saves a state", aside)


def list_report_files(folder: Path) -> list[Path]:
    """Return the files of a run's report that are there, and the trees that were tuned for it."""
    files = [folder / name for name in REPORT_FILES] + sorted(folder.glob(f"*-{TUNED}.json"))
    return [file for file in files if file.exists()]


def remove_files(files: list[Path]) -> None:
    """Remove files and folders."""
    for file in files:
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()


def check_disk_space(folder: Path, draft: Draft, target: Target | None = None) -> None:
    """Raise UserError if the disk lacks space for the files of a run, beside those that it has already."""
    files = [path for name in (STATES_FOLDER, "checkpoint") for path in (folder / name).rglob("*") if path.is_file()]
    needed = disk_bytes_needed(draft, target) - sum(path.stat().st_size for path in files)
    free = shutil.disk_usage(folder).free
    require(
        free >= needed,
        f"output_dir: needs {needed / 1e9:.2f} GB of free disk space for this draft, "
        f"got {free / 1e9:.2f} GB in {folder}; free some space"
        + (f", such as {replaced}," if (replaced := folder / REPLACED_FOLDER).exists() else "")
        + " or choose another output_dir",
    )


def disk_bytes_needed(draft: Draft, target: Target | None = None) -> int:
    """Return the bytes of two states and two checkpoints.

    A new state or checkpoint is complete before the old one is removed. A state holds the trained weights and their two
    moments. `target` is needed for a draft that adapts it, whose checkpoint includes the adapted target.
    """
    needed = 2 * sum(weight.nbytes for weight in draft.list_saved_weights())
    needed += 2 * 3 * sum(p.nbytes for p in trained_parameters(draft))
    if target is not None and (adapted := draft.get_adapted_target(target)) is not None:
        # Its only trained parameters are adapters, which are merged when it is written.
        needed += 2 * sum(p.nbytes for p in adapted.model.parameters() if not p.requires_grad)
    return needed


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Turn errors of a full disk, raised in the block, into a one-line UserError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if isinstance(error, CheckpointException) and any(
            isinstance(failure[0], KeyboardInterrupt) for failure in error.failures.values()
        ):
            raise KeyboardInterrupt from error
        is_full = any(message in str(error).lower() for message in DISK_FULL_MESSAGES)
        if getattr(error, "errno", None) not in DISK_FULL_ERRNOS and not is_full:
            raise
        raise UserError(
            f"output_dir: the disk is full, got {folder}; free some space and start the "
            "same command again: it continues from the last state"
        ) from error
