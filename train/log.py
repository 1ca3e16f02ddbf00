"""What a run says: one flat dict a line in metrics.jsonl always, Weights & Biases if asked.

To people it shows a progress bar on a terminal and plain lines elsewhere.
"""

import json
import logging
import uuid
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as RichProgress,
)

from infer.report.tables import Table
from models.console import CONSOLE
from models.errors import UserError
from train.state import State

SHOWN = (  # the others are for the curves
    "rows", "epochs", "tokens", "loss", "tau", "lr", "tokens_per_s", "data_wait",
)  # fmt: skip
log = logging.getLogger(__name__)


class Wandb(Enum):
    """Where curves go besides metrics.jsonl. `offline` writes a folder for `wandb sync`."""

    off = "off"
    offline = "offline"
    online = "online"


@dataclass(kw_only=True)
class LogConf:
    """How often a run speaks, and to whom."""

    wandb: Wandb = Wandb.off
    project: str = "drafts"
    entity: str | None = None
    every: int = 10  # steps

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"log.every: must be at least 1, got {self.every}")

    def trackers(self) -> list[str]:
        """Names for Accelerate. Raises UserError where the package is missing."""
        if self.wandb is Wandb.off:
            return []
        if find_spec("wandb") is None:
            raise UserError(
                f"log.wandb: needs the wandb package, got {self.wandb.value}; "
                "pip install wandb or log.wandb=off"
            )
        return ["wandb"]


class Steps(RichProgress):
    """How far the training is: a bar on a terminal, else a line for every report."""

    def __init__(self, *, done: int, steps: int):
        super().__init__(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=CONSOLE, disable=not CONSOLE.is_terminal,
        )  # fmt: skip
        self.steps = steps
        self.bar = self.add_task("", total=steps, completed=done)

    def report(self, done: int, values: dict[str, float], *, seconds_a_step: float) -> None:
        """Say the newest figures."""
        words = "  ".join(f"{name} {short(values[name])}" for name in SHOWN if name in values)
        self.update(self.bar, completed=done, description=words)
        if self.disable:
            left = round((self.steps - done) * seconds_a_step)
            log.info("step %d/%d  %s  %d:%02d left", done, self.steps, words, left // 60, left % 60)


def short(value: float) -> str:
    """Write a figure of any size in few characters.

    >>> [short(value) for value in (0.00123456, 2.5, 4_915_200.0)]
    ['0.001235', '2.5', '4,915,200']
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


class Log:
    """The metrics of one run folder, from where it stands on. Only the main process writes."""

    def __init__(self, conf: LogConf, state: State, accelerator: Accelerator):
        self.conf, self.accelerator, self.folder = conf, accelerator, state.folder
        self.file = self.folder / "metrics.jsonl"
        if conf.wandb is not Wandb.off:
            state.progress.tracker = state.progress.tracker or uuid.uuid4().hex[:12]
            self._start_wandb(state.progress.tracker, state.config)

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps, which are about to be taken again."""
        if self.accelerator.is_main_process:
            forget(self.file, after=step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics."""
        line = {"step": step, **values}
        if self.accelerator.is_main_process:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.accelerator.log(line)

    def hand_over(self, summary: Table) -> None:
        """Give the report and the checkpoint to the tracker."""
        if self.conf.wandb is not Wandb.off:
            self._upload(summary)

    def _start_wandb(self, run_id: str, config: dict[str, Any]) -> None:
        place = {
            "mode": self.conf.wandb.value,
            "dir": str(self.folder),
            "entity": self.conf.entity,
            "name": self.folder.name,
            "id": run_id,
            "resume": "allow",
        }
        self.accelerator.init_trackers(self.conf.project, config, {"wandb": place})
        if self.accelerator.is_main_process:
            # W&B's own step must not fall, which it does when a killed run continues.
            self._wandb().define_metric("*", "step")

    def _wandb(self) -> Any:  # its run; the package is imported only where it is asked for
        return self.accelerator.get_tracker("wandb", unwrap=True)

    def _upload(self, summary: Table) -> None:
        import wandb

        run = self._wandb()
        page = (self.folder / "report.html").read_text()
        run.log({
            "report/table": wandb.Table(columns=[*summary.columns], data=[*summary.rows]),
            "report/page": wandb.Html(page, inject=False),
        })  # fmt: skip
        artifact = wandb.Artifact(f"draft-{run.id}", type="model")
        artifact.add_dir(str(self.folder / "checkpoint"), name="checkpoint")
        for suffix in ("json", "md", "html"):
            artifact.add_file(str(self.folder / f"report.{suffix}"))
        run.log_artifact(artifact)


def forget(file: Path, *, after: int) -> None:
    """Drop lines of later steps, which a continued run will write again, and a torn last line."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] > after:
            break
        kept.append(line)
    whole = file.with_suffix(".tmp")
    whole.write_text("".join(kept))
    whole.replace(file)
