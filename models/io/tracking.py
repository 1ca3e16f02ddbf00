"""Weights & Biases: where a command logs its results, and how they are sent.

A draft's results belong into the W&B run that trained it; other results get a run of their own.
wandb takes seconds to import, so it is imported only where it is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models.io.console import IS_MAIN_PROCESS
from models.io.errors import UserError, first_line, require


class Wandb(Enum):
    """Modes of Weights & Biases; `offline` writes a folder for `wandb sync`."""

    off = "off"
    offline = "offline"
    online = "online"


@dataclass(kw_only=True)
class TrackerConf:
    """The `log` group of a command."""

    wandb: Wandb = Wandb.off
    project: str = "drafts"
    entity: str | None = None

    def list_trackers(self) -> list[str]:
        """Return the trackers to start with Accelerate."""
        return [] if self.wandb is Wandb.off else ["wandb"]

    def check_wandb(self) -> None:
        """Raise UserError if wandb is missing or, for `online`, not logged in: on a terminal it asks for the key."""
        require(
            self.wandb is Wandb.off or find_spec("wandb") is not None,
            f"log.wandb: needs the wandb package, got {self.wandb.value}; "
            "run `pip install wandb`, or set log.wandb=off",
        )
        if self.wandb is not Wandb.online or not IS_MAIN_PROCESS:
            return
        import wandb

        try:
            problem = None if wandb.login(verify=False) else "no login"
        except wandb.Error as error:
            problem = first_line(error)
        require(
            problem is None,
            f"log.wandb: online needs an API key, got none that works ({problem}); set "
            "WANDB_API_KEY, or take log=wandb-offline or log=console",
        )


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The W&B run of a training."""

    id: str
    project: str
    entity: str | None


@dataclass(frozen=True, kw_only=True)
class TrackedResults:
    """Results of a command to log in W&B, under names that begin with `prefix`."""

    prefix: str
    figures: dict[str, int | float | str]
    columns: list[str]
    rows: list[list[str]]
    page: str | None = None  # HTML

    def to_wandb(self) -> dict[str, Any]:
        """Return what a W&B run logs."""
        import wandb

        table = wandb.Table(columns=[*self.columns], data=[*self.rows])
        values: dict[str, Any] = {**self.figures, "table": table}
        if self.page is not None:
            values["page"] = wandb.Html(self.page, inject=False)
        return {f"{self.prefix}/{name}": value for name, value in values.items()}


@contextmanager
def report_wandb_errors(*, remedy: str) -> Iterator[None]:
    """Turn errors of W&B, raised in the block, into a one-line UserError."""
    import wandb

    try:
        yield
    except wandb.Error as error:
        raise UserError(f"log.wandb: W&B must take the results, got {first_line(error)}; {remedy}") from error


def upload_results(
    conf: TrackerConf, folder: Path, results: TrackedResults, training: TrackedRun | None = None
) -> None:
    """Send the results to the training's run, or to a new one named as `folder`; raise UserError if W&B refuses."""
    if conf.wandb is Wandb.off:
        return
    import wandb

    if training is None:
        place: dict[str, Any] = {"project": conf.project, "entity": conf.entity, "name": folder.name}
    else:  # whose console output and description of the machine stay its own
        settings = wandb.Settings(console="off", x_disable_meta=True, x_disable_stats=True)
        place = {**asdict(training), "resume": "allow", "settings": settings}
    with (
        report_wandb_errors(remedy=f"they are in {folder}"),
        wandb.init(mode=conf.wandb.value, dir=str(folder), **place) as run,
    ):
        run.log(results.to_wandb())
