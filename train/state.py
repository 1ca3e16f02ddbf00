"""What a run needs to continue: all of it, saved whole or not at all.

    state/00000120/            what is trained, optimizers, schedules, and progress.json
    state/00000160.partial/    being written; swept away when the run is started again

Frozen weights are left out: a draft is built with them. Beside the newest state stands, where the
schedule has one, the state from before the decay, which an extended run continues from.

A state takes its name in one rename and only then is the one before it removed, so that a kill at
any moment leaves a complete one. Every process writes its part (torch.distributed.checkpoint), and
any number of processes reads what it needs of it. Random numbers are not kept: each step draws its
own, by its number.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from models.checkpoint import PARTIAL, atomic_directory, atomic_path
from models.drafts.base import DraftConf
from models.errors import UserError
from train.distributed.parallel import Parallel

log = logging.getLogger(__name__)

PROGRESS = "progress.json"
FLAT = StateDictOptions(  # moments by the weight's name
    flatten_optimizer_state_dict=True,
    ignore_frozen_params=True,
    strict=False,  # else frozen weights would be missed; dcp.load misses any other
)
# What may differ when a run is continued: where it writes and what it says, not what it learns.
# device.route says where `device.name=auto` had led to.
FREE = (
    "log.", "data.for_any_target", "evaluation.", "output_dir", "resume", "save_every",
    "save_minutes", "device.threads", "device.name", "device.cache_dir", "device.visible_cores",
    "device.num_cores", "parallel.",
)  # fmt: skip
EXTENDS = ("optim.steps", "optim.epochs")  # train/extension.py decides whether they may differ


@dataclass(kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    steps: int | None = None  # of the whole run, once its number of rows is known
    warmup_steps: int | None = None
    kept: int | None = None  # step of a state that is kept, so that the run can be extended
    tokens: int = 0  # of the rows that were learned from
    answer_tokens: int = 0  # those of them that the draft learns to propose
    best: float | None = None  # delivered tokens a round of the checkpoint
    best_step: int | None = None
    tracker: str | None = None  # id of the tracker's run, to continue its curves


def flat(conf: Any, prefix: str = "") -> dict[str, Any]:
    """A config as JSON values by dotted key."""
    values = {f"{prefix}method": conf.method} if isinstance(conf, DraftConf) else {}
    for key, value in ((prefix + field.name, getattr(conf, field.name)) for field in fields(conf)):
        if is_dataclass(value):
            values |= flat(value, f"{key}.")
        else:
            values[key] = value.name if isinstance(value, Enum) else value
    return json.loads(json.dumps(values, default=str))


@dataclass(kw_only=True)
class Learning:
    """All that a step changes, named as no number of processes changes it."""

    module: nn.Module
    optimizers: list[Optimizer]
    schedules: list[LRScheduler]

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.module, self.optimizers, options=FLAT)
        done = [schedule.state_dict() for schedule in self.schedules]
        return {"weights": weights, "moments": moments, "schedules": done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.module, self.optimizers, options=FLAT,
            model_state_dict=state["weights"], optim_state_dict=state["moments"],
        )  # fmt: skip
        for schedule, done in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(done)


class State:
    """A run folder, the config it was started with, how far it is, and its saved states."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        self.folder, self.states, self.config = folder, folder / "state", config
        self.progress = Progress()
        self.started: dict[str, Any] = {}  # the config of the newest state

    def complete(self) -> list[Path]:
        """List the states that are not being written."""
        return [path for path in self.states.glob("*") if path.suffix != PARTIAL]

    def newest(self) -> Path | None:
        """The last complete state."""
        return max(self.complete(), default=None)

    def find(self) -> Progress:
        """How far the run is. Raises UserError if it was started with another config."""
        newest = self.newest()
        if newest is None:
            return self.progress
        saved = json.loads((newest / PROGRESS).read_text())
        self.started = saved["config"]
        self._refuse_changes(self.started)
        if saved["threads"] != torch.get_num_threads():
            log.warning(
                "the run was started with %s threads and continues with %s: "
                "its weights may differ in the last bits",
                saved["threads"],
                torch.get_num_threads(),
            )
        # States of older versions have their number of steps in the config alone.
        self.progress = Progress(**({"steps": self.started["optim.steps"]} | saved["progress"]))
        return self.progress

    def sweep(self) -> None:
        """Remove all but the newest state and the one that it says is kept."""
        newest = self.newest()
        stay = [newest]
        if newest is not None:
            kept = json.loads((newest / PROGRESS).read_text())["progress"].get("kept")
            stay += [] if kept is None else [self._place(kept)]
        for path in self.states.glob("*"):
            if path not in stay:
                _remove(path)

    def go_back(self, place: Path, parallel: Parallel) -> None:
        """Make `place` the newest state: later steps will be taken anew, and differently."""
        later, newest = self.progress, self.newest()
        parallel.wait()  # else one might look for a state that is removed already
        if place == newest:
            return
        saved = json.loads((place / PROGRESS).read_text())
        self.progress = Progress(**saved["progress"])
        self.progress.tracker = later.tracker
        unfinished = later.step != later.steps  # it may have found a better draft since its state
        if unfinished or later.best_step is None or later.best_step > self.progress.step:
            # The checkpoint is of a step that this run will not have: the next one replaces it.
            self.progress.best = self.progress.best_step = None
        parallel.wait()
        if parallel.main:
            with atomic_path(place / PROGRESS) as partial:
                partial.write_text(json.dumps(saved | {"progress": asdict(self.progress)}))
            for path in self.complete():
                if path > place:
                    _remove(path)
        parallel.wait()

    def save(self, learning: Learning, parallel: Parallel) -> None:
        """Replace the newest state, on all processes together."""
        place = self._place(self.progress.step)
        saved = {
            "progress": asdict(self.progress),
            "threads": torch.get_num_threads(),
            "config": self.config,
        }
        partial = place.with_name(place.name + PARTIAL)
        with atomic_directory(place) if parallel.main else nullcontext(partial) as partial:
            parallel.wait()
            with _no_word_of_one_process(), parallel.whole_moments(learning.optimizers):
                dcp.save(learning.state_dict(), checkpoint_id=partial, no_dist=parallel.alone)
            if parallel.main:
                (partial / PROGRESS).write_text(json.dumps(saved, indent=2))
        if parallel.main:
            self.sweep()
        parallel.wait()

    def load(self, learning: Learning, parallel: Parallel) -> None:
        """Bring back the newest state, if there is one, into what was prepared."""
        newest = self.newest()
        if newest is not None:
            state = learning.state_dict()
            with _no_word_of_one_process():
                dcp.load(state, checkpoint_id=newest, no_dist=parallel.alone)
            learning.load_state_dict(state)

    def _place(self, step: int) -> Path:
        return self.states / f"{step:08d}"

    def _refuse_changes(self, saved: dict[str, Any]) -> None:
        for key in sorted(saved.keys() | self.config.keys()):
            before, now = saved.get(key), self.config.get(key)
            if before != now and not key.startswith(FREE) and key not in EXTENDS:
                started = f"with {before}" if key in saved else "without it"
                raise UserError(
                    f"{key}: the run was started {started}, got {now}; "
                    "use another run_name or resume=false"
                )


def _remove(state: Path) -> None:
    """Remove a state by its name first: a kill must not leave a part of it that looks whole."""
    gone = state.with_suffix(PARTIAL)
    if gone != state and state.exists():
        shutil.rmtree(gone, ignore_errors=True)
        state.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _no_word_of_one_process() -> Iterator[None]:
    """PyTorch warns of it although it was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def saved_tensors(state: Path, part: str = "weights") -> dict[str, Tensor]:
    """What a state holds of the weights, without anything to load it into."""
    reader = dcp.FileSystemReader(state)
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(f"{part}.")
    }
    with _no_word_of_one_process():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items()}
