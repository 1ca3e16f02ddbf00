"""Metrics of a run: a flat JSON object per line of metrics.jsonl, and optionally W&B.

Metrics of training steps stay on the device, and are read in one transfer for each line.
"""

import json
import logging
import uuid
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from models.io.console import CONSOLE, SHOWS_BARS
from models.io.files import write_text_atomically
from models.io.tracking import TrackedResults, TrackerConf, Wandb, report_wandb_errors
from train.distributed.parallel import Parallel
from train.run.state import RunState

# The others are plotted, not printed.
PROGRESS_METRICS = ("rows", "epochs", "tokens", "loss", "teacher_forced_tau", "lr", "tokens_per_s", "data_wait")
log = logging.getLogger(__name__)


class MetricBuffer:
    """Sums and counts of up to `steps` steps, in one tensor with a line for each step."""

    def __init__(self, *, steps: int):
        self.steps, self.num_lines = steps, 0
        self.names: list[str] = []
        self.lines: Float[Tensor, "steps names 2"] | None = None

    def add(self, sums: dict[str, Float[Tensor, " 2"]]) -> None:
        """Append the (sum, count) of each metric of a step, always in the same order."""
        line = torch.stack([pair.detach().float() for pair in sums.values()])
        if self.lines is None:
            self.names = list(sums)
            # Allocated on the host: on the device, only the first step's graph would contain it.
            self.lines = torch.zeros(self.steps, *line.shape).to(line.device)
        self.lines.index_copy_(0, torch.tensor([self.num_lines]).to(line.device), line[None])
        self.num_lines += 1

    def read(self, parallel: Parallel) -> dict[str, list[tuple[float, float]]]:
        """Empty the buffer: return each metric's (sum, count) of each step, summed over all processes; collective."""
        assert self.lines is not None
        num_steps, self.num_lines = self.num_lines, 0
        steps = parallel.all_reduce_sum(self.lines).cpu()[:num_steps].tolist()
        return {name: [tuple(step[i]) for step in steps] for i, name in enumerate(self.names)}


class ProgressBar(Progress):
    """The progress of training: a bar on a terminal, otherwise a log line per report."""

    def __init__(self, *, steps_done: int, steps: int):
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, TextColumn("{task.description}"), console=CONSOLE, disable=not SHOWS_BARS)
        self.steps = steps
        self.bar = self.add_task("", total=steps, completed=steps_done)

    def report(self, step: int, values: dict[str, float], *, seconds_per_step: float) -> None:
        """Show the metrics after `step` completed steps, and the time left."""
        figures = "  ".join(f"{name} {format_metric(values[name])}" for name in PROGRESS_METRICS if name in values)
        self.update(self.bar, completed=step, description=figures)
        if self.disable:
            seconds = round((self.steps - step) * seconds_per_step)
            log.info("step %d/%d  %s  %d:%02d left", step, self.steps, figures, seconds // 60, seconds % 60)


def format_metric(value: float) -> str:
    """Format a figure of any size in few characters.

    >>> [format_metric(value) for value in (0.00123456, 2.5, 4_915_200.0)]
    ['0.001235', '2.5', '4,915,200']
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


class MetricLogger:
    """Writer of a run folder's metrics on the main process, appending to those of a continued run."""

    def __init__(self, conf: TrackerConf, state: RunState, accelerator: Accelerator):
        self.conf, self.accelerator, self.folder = conf, accelerator, state.folder
        self.file = self.folder / "metrics.jsonl"
        if conf.wandb is not Wandb.off:
            self._start_wandb(state)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append the metrics of a step to metrics.jsonl, and send them to the tracker."""
        metrics = {"step": step, **values}
        if self.accelerator.is_main_process:
            with self.file.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        self.accelerator.log(metrics)

    def upload_report(self, results: TrackedResults) -> None:
        """Upload the report and the checkpoint to the tracker."""
        if self.conf.wandb is Wandb.off:
            return
        import wandb  # imported here, because the package is needed only if it is enabled

        run = self._wandb_run()
        with report_wandb_errors(remedy=f"they are in {self.folder}"):
            run.log(results.to_wandb())
            artifact = wandb.Artifact(f"draft-{run.id}", type="model")
            artifact.add_dir(str(self.folder / "checkpoint"), name="checkpoint")
            for suffix in ("json", "md", "html"):
                artifact.add_file(str(self.folder / f"report.{suffix}"))
            run.log_artifact(artifact)

    def _start_wandb(self, state: RunState) -> None:
        state.progress.tracker = state.progress.tracker or uuid.uuid4().hex[:12]
        settings = {
            "mode": self.conf.wandb.value,
            "dir": str(self.folder),
            "entity": self.conf.entity,
            "name": self.folder.name,
            "id": state.progress.tracker,
            "resume": "allow",
        }
        with report_wandb_errors(remedy="check log.entity and log.project, or take log=wandb-offline"):
            self.accelerator.init_trackers(self.conf.project, state.config, {"wandb": settings})
        if self.accelerator.is_main_process:
            # Plot over axes of ours: W&B's step must not decrease, as the step of a run does that
            # was killed and continues. A star matches no slash, and may not match a name twice.
            self._wandb_run().define_metric("train/*", "step")
            self._wandb_run().define_metric("eval/*", "train/tokens")

    def _wandb_run(self) -> Any:
        return self.accelerator.get_tracker("wandb", unwrap=True)


def drop_later_lines(file: Path, *, after: int) -> None:
    """Drop lines of later steps, which a continued run writes again, and a torn last line."""
    if file.exists():
        lines = takewhile(
            lambda line: line.endswith("\n") and json.loads(line)["step"] <= after,
            file.read_text().splitlines(keepends=True),
        )
        write_text_atomically(file, "".join(lines))
