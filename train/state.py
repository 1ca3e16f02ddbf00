"""What a run needs to continue: all of it, saved whole or not at all.

    state/00000120/            weights, optimizers, schedules, random numbers, and progress.json
    state/00000160.partial/    being written; swept away when the run is started again

A state takes its name in one rename and only then is the one before it removed, so that a kill at
any moment leaves a complete one.
"""

import json
import logging
import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from models.checkpoint import PARTIAL, atomic_directory
from models.drafts.base import DraftConf
from models.errors import UserError

log = logging.getLogger(__name__)

# What may differ when a run is continued: where it writes and what it says, not what it learns.
# device.route says where `device.name=auto` had led to.
FREE = (
    "log.", "evaluation.", "output_dir", "resume", "save_every", "device.threads", "device.name",
    "device.cache_dir", "device.visible_cores", "device.num_cores",
)  # fmt: skip


@dataclass(kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    best: float | None = None  # acceptance length of the checkpoint
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


class State:
    """A run folder, the config it was started with, how far it is, and its saved states."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        self.folder, self.states, self.config = folder, folder / "state", config
        self.progress = Progress()

    def newest(self) -> Path | None:
        """The last complete state."""
        complete = [path for path in self.states.glob("*") if path.suffix != PARTIAL]
        return max(complete, default=None)

    def find(self) -> Progress:
        """How far the run is. Raises UserError if it was started with another config."""
        newest = self.newest()
        if newest is None:
            return self.progress
        saved = json.loads((newest / "progress.json").read_text())
        self._refuse_changes(saved["config"])
        if saved["threads"] != torch.get_num_threads():
            log.warning(
                "the run was started with %s threads and continues with %s: "
                "its weights may differ in the last bits",
                saved["threads"],
                torch.get_num_threads(),
            )
        self.progress = Progress(**saved["progress"])
        return self.progress

    def sweep(self) -> None:
        """Remove what a kill left behind."""
        newest = self.newest()
        for path in self.states.glob("*"):
            if path != newest:
                shutil.rmtree(path)

    def save(self, accelerator: Accelerator) -> None:
        """Replace the newest state, on all processes together."""
        place = self.states / f"{self.progress.step:08d}"
        main = accelerator.is_main_process
        saved = {
            "progress": asdict(self.progress),
            "threads": torch.get_num_threads(),
            "config": self.config,
        }
        partial = place.with_name(place.name + PARTIAL)
        with atomic_directory(place) if main else nullcontext(partial) as partial:
            accelerator.wait_for_everyone()
            accelerator.save_state(str(partial))
            accelerator.wait_for_everyone()
            if main:
                (partial / "progress.json").write_text(json.dumps(saved, indent=2))
        if main:
            self.sweep()
        accelerator.wait_for_everyone()

    def load(self, accelerator: Accelerator) -> None:
        """Bring back the newest state, if there is one, into what was prepared."""
        newest = self.newest()
        if newest is not None:
            accelerator.load_state(str(newest))

    def _refuse_changes(self, saved: dict[str, Any]) -> None:
        for key in sorted(saved.keys() | self.config.keys()):
            before, now = saved.get(key), self.config.get(key)
            if before != now and not key.startswith(FREE):
                raise UserError(
                    f"{key}: the run was started with {before}, got {now}; "
                    "use another run_name or resume=false"
                )
