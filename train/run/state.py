"""Saved states: everything that a run needs to continue, saved completely or not at all.

    state/00000120/            trained weights, optimizers, schedules, and progress.json
    state/00000160.partial/    being written; removed when the run is started again

A state gets its name by one rename, and only then is the previous one removed. Every process writes its part, and any
number of processes can read it back. Frozen weights are left out, and random generators: a step seeds its own.
"""

import json
import logging
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from data.config import DataSource
from models.checkpoints.saved_states import (
    PROGRESS_FILE,
    REPLACED_FOLDER,
    STATES_FOLDER,
    find_newest_state,
    read_progress_file,
)
from models.drafts.options import DraftConf
from models.io.errors import require
from models.io.files import PARTIAL_SUFFIX, add_partial_suffix, atomic_directory
from models.trees.config import list_unread_fields
from models.trees.tree import TreeKind
from train.config.run import TrainConf
from train.distributed.parallel import Parallel

log = logging.getLogger(__name__)

STATE_VERSION = 4
STATE_DICT_OPTIONS = StateDictOptions(  # keys moments by their weight's name
    flatten_optimizer_state_dict=True,
    ignore_frozen_params=True,
    strict=False,  # frozen weights may be missing; dcp.load reports any other
)
# Beginnings of keys that may differ when a run is continued: they change its outputs and logs, not its weights,
# or only how sums are rounded. device.route, which `device.name=auto` resolved to, must not differ.
CHANGEABLE_PREFIXES = (
    *("log.", "interval.log", "interval.save", "output_dir", "resume", "evaluation.", "tune", "parallel."),
    *("data.license", "data.processes", "optim.micro_batch_size", "optim.recompute", "loss.logits_chunk"),
    *("held_out.batch", "device.name"),
    *("device.threads", "device.cache_dir", "device.visible_cores", "device.num_cores", "device.memory_gib"),
)
# Of these, what the figure that chooses the checkpoint depends on.
JUDGING_PREFIXES = ("evaluation.sampling.", "evaluation.max_new_tokens")
STEP_KEYS = ("optim.steps", "optim.epochs")  # train/run/folder.py checks whether they may differ


@dataclass(kw_only=True)
class RunProgress:
    """Progress of a run."""

    step: int = 0
    steps: int = 0  # of the whole run, once its rows are counted
    num_rows: int = 0  # packed rows to train on, once they are counted
    tokens: int = 0  # of the visited rows
    answer_tokens: int = 0  # of these, tokens of answers
    target_hash: str | None = None
    frozen_hash: str | None = None  # of a pretrained draft's weights that do not learn, which states leave out
    rows_hash: str | None = None  # of the training rows
    best: float | None = None  # of the checkpoint, the figure that chose it
    best_step: int | None = None
    tracker: str | None = None  # id of the tracker's run, to continue its curves


def flatten_config(conf: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a config by dotted key, as JSON can hold them."""
    values = {f"{prefix}method": conf.method} if isinstance(conf, DraftConf) else {}
    for key, value in ((prefix + part.name, getattr(conf, part.name)) for part in fields(conf)):
        if is_dataclass(value):
            values |= flatten_config(value, f"{key}.")
        else:
            values[key] = value.name if isinstance(value, Enum) else value
    return json.loads(json.dumps(values, default=str))


def read_saved_config(state: Path) -> dict[str, Any]:
    """Return the values by dotted key of the config that a saved state was trained with.

    A key that is younger than the state, but for those of `draft`, has its default, which is what was done before there
    was a choice.
    """
    defaults = {"measure": True}
    for group in fields(TrainConf):
        build: Any = group.default_factory
        if is_dataclass(build):
            defaults |= flatten_config(cast(Any, build)(), f"{group.name}.")
    return defaults | read_progress_file(state)["config"]


@dataclass(kw_only=True)
class TrainingState:
    """Everything that a step changes, by names that are the same for any number of processes."""

    module: nn.Module
    optimizers: list[Optimizer]
    schedules: list[LRScheduler]

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.module, self.optimizers, options=STATE_DICT_OPTIONS)
        schedules = [schedule.state_dict() for schedule in self.schedules]
        return {"weights": weights, "moments": moments, "schedules": schedules}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.module,
            self.optimizers,
            options=STATE_DICT_OPTIONS,
            model_state_dict=state["weights"],
            optim_state_dict=state["moments"],
        )
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)


class RunState:
    """A run folder: the config it was started with, its progress and its saved states."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        self.folder, self.states_dir, self.config = folder, folder / STATES_FOLDER, config
        self.saved_config = config  # of the run that this one continues
        self.progress = RunProgress()

    def load_progress(self) -> None:
        """Load the progress of the newest state, if any; raise UserError if it was started with another config."""
        newest = find_newest_state(self.folder)
        if newest is None:
            return
        saved = read_progress_file(newest)
        require(
            saved["version"] == STATE_VERSION,
            f"run_name: must name a run of version {STATE_VERSION}, got {saved['version']} in "
            f"{self.folder}; use another run_name or resume=false",
        )
        self.saved_config = read_saved_config(newest)
        source = self.saved_config.get("data.source")
        unread = {f"data.{name}" for name in DataSource[source].unread_keys} if source else set()
        if kind := self.saved_config.get("tree.kind"):
            unread |= {f"tree.{name}" for name in list_unread_fields(TreeKind[kind])}
        for key in sorted(self.saved_config.keys() | self.config.keys(), key=lambda key: (key != "draft.method", key)):
            before, now = self.saved_config.get(key), self.config.get(key)
            require(
                before == now or key.startswith(CHANGEABLE_PREFIXES) or key in STEP_KEYS or key in unread,
                f"{key}: the run was started with {before}, got {now}; use another run_name or resume=false",
            )
        self.progress = RunProgress(**saved["progress"])

    def drop_incomparable_best(self) -> None:
        """Let the next figure choose a checkpoint, if those before were of answers of other lengths or sampling."""
        if self.config.get("measure", True) and any(
            self.config[key] != self.saved_config.get(key) for key in self.config if key.startswith(JUDGING_PREFIXES)
        ):
            log.info("the best checkpoint is chosen anew: it was chosen with other settings of the evaluation")
            self.progress.best = self.progress.best_step = None

    def record_models(self, target_hash: str, frozen_hash: str | None) -> None:
        """Record the hashes of all weights that no state has; raise UserError for others than before."""
        progress, remedy = self.progress, "restore them, or use another run_name or resume=false"
        for key, before, now in (
            ("target.path", progress.target_hash, target_hash),
            ("draft.path", progress.frozen_hash, frozen_hash),
        ):
            require(
                before in (None, now),
                f"{key}: must have the weights that the run was started with, got others; {remedy}",
            )
        progress.target_hash, progress.frozen_hash = target_hash, frozen_hash

    def record_rows(self, rows_hash: str) -> None:
        """Record the hash of the rows, from which the vocabulary follows; raise UserError for others than before."""
        require(
            self.progress.rows_hash in (None, rows_hash),
            "data: must be the training rows that the run was started with, got others, because the data or "
            "evaluation.max_new_tokens has changed; restore it, or use another run_name or resume=false",
        )
        self.progress.rows_hash = rows_hash

    def remove_old_states(self) -> None:
        """Remove all states but the newest."""
        newest = find_newest_state(self.folder)
        for path in self.states_dir.glob("*"):
            if path != newest and path.stem.isdecimal():  # also the partial ones; others are a user's
                remove_state(path)

    def save(self, training_state: TrainingState, parallel: Parallel) -> None:
        """Save a state and remove the previous one; collective."""
        path = self.states_dir / f"{self.progress.step:08d}"
        partial = add_partial_suffix(path)
        with atomic_directory(path) if parallel.is_main else nullcontext(partial) as partial:
            parallel.barrier()
            with _silence_dcp_warning(), parallel.full_moments(training_state.optimizers):
                state, alone = training_state.state_dict(), parallel.is_single_process
                dcp.save(state, checkpoint_id=partial, process_group=parallel.host_group, no_dist=alone)
            if parallel.is_main:
                saved = {"version": STATE_VERSION, "progress": asdict(self.progress), "config": self.config}
                (partial / PROGRESS_FILE).write_text(json.dumps(saved, indent=2))
        if parallel.is_main:
            self.remove_old_states()
            for name in (REPLACED_FOLDER, f"{REPLACED_FOLDER}{PARTIAL_SUFFIX}"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        parallel.barrier()

    def load(self, training_state: TrainingState, parallel: Parallel) -> None:
        """Load the newest state, if there is one, into the prepared modules and optimizers."""
        newest = find_newest_state(self.folder)
        if newest is not None:
            state = training_state.state_dict()
            with _silence_dcp_warning():
                alone = parallel.is_single_process
                dcp.load(state, checkpoint_id=newest, process_group=parallel.host_group, no_dist=alone)
            training_state.load_state_dict(state)


def remove_state(state: Path) -> None:
    """Remove a state, renamed first: a kill leaves no part of it that looks complete."""
    partial = state.with_suffix(PARTIAL_SUFFIX)
    if partial != state and state.exists():
        shutil.rmtree(partial, ignore_errors=True)
        state.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _silence_dcp_warning() -> Iterator[None]:
    """Silence PyTorch's warning that it saves or loads in one process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@dataclass(kw_only=True)
class SaveSchedule:
    """Schedule of saves, the same on all processes, by the clock of the main process."""

    parallel: Parallel
    minutes: float
    every_steps: int | None  # in place of the minutes
    overdue: bool = False
    saved_at: float = field(default_factory=time.perf_counter)

    def is_due(self, steps_done: int) -> bool:
        """Return whether to save the state after these steps, by the last reading of the clock."""
        return self.overdue if self.every_steps is None else steps_done % self.every_steps == 0

    def read_clock(self) -> None:
        """Set `overdue` by the main process's clock: a collective, so not for every step."""
        if self.every_steps is None and not self.overdue:
            is_late = time.perf_counter() - self.saved_at >= 60 * self.minutes
            self.overdue = any(self.parallel.gather(self.parallel.is_main and is_late))

    def restart(self) -> None:
        """Restart the clock: a state was saved."""
        self.overdue, self.saved_at = False, time.perf_counter()
