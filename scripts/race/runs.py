"""What the runs of a race share, and where a run has its files and figures."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models.io.errors import require
from models.io.files import write_text_atomically
from models.targets.config import TargetConf
from scripts.race.documents import SUMMARY
from scripts.studies.chain_rounds import name_target

OURS, PEER, MATCHED = SIDES = ("ours", "peer", "matched")  # matched: the peer with our mask and our steps of unroll
DEPTHS = [3, 4]  # of the judged chains; settings are chosen by the deepest
COST_FOLDER = "cost"
COST_STEPS = 60  # of the runs that are timed
UNTIMED_STEPS = 10  # at the start of a run: they compile, and our metrics come every ten
# Both sides at their fastest: the peer compiles its training step on CUDA alone.
COST_OVERRIDES = ["device.compile=true", "optim.compile_loss=true"]


@dataclass(frozen=True, kw_only=True)
class Race:
    """What all runs of a race share; `target` and the files of prompts are the demo's if they are None."""

    output: Path
    target: str | None
    prompts: str | None  # that are judged
    calibration: str | None  # prompts that choose a side's setting
    steps: int
    overrides: list[str]  # of our runs, whose documents the peer gets
    peer_overrides: list[str]  # arguments of `speculators train`

    @property
    def target_path(self) -> str:
        """Return the path that other packages load the target from."""
        return TargetConf(name=name_target(self.target), path=self.target).location

    def list_figures(self) -> list[dict[str, Any]]:
        """Return the figures of every run that has trained, by seed."""
        figures = [json.loads(file.read_text()) for file in sorted(self.output.glob("*-seed*.json"))]
        return sorted(figures, key=lambda run: run["seed"])

    def documents(self, seed: int) -> Path:
        """Return the folder of the documents that the runs of a seed train on."""
        return self.output / f"documents-seed{seed}"

    @property
    def short(self) -> "Race":
        """Return the race of few steps that training is timed by."""
        return replace(
            self, output=self.output / COST_FOLDER, steps=COST_STEPS, overrides=[*self.overrides, *COST_OVERRIDES]
        )

    def share_documents(self) -> None:
        """Link the answers and documents into the folder of the short race."""
        self.short.output.mkdir(exist_ok=True)
        for source in (self.output / "answers", *self.output.glob("documents-seed*")):
            link = self.short.output / source.name
            if source.exists() and not link.exists():
                link.symlink_to(source.resolve(), target_is_directory=True)

    def save(self) -> None:
        """Write the settings; raise UserError if the folder holds a race with other settings."""
        file = self.output / "race.json"
        settings = {name: value for name, value in asdict(self).items() if name != "output"}
        saved = json.loads(file.read_text()) if file.exists() else settings
        require(
            saved == settings,
            f"--output: must be another folder for other settings, got {self.output} with {saved}; choose another",
        )
        self.output.mkdir(parents=True, exist_ok=True)
        write_text_atomically(file, json.dumps(settings))

    @classmethod
    def load(cls, output: Path) -> "Race":
        """Return the race of a folder; raise UserError if it holds none."""
        file = output / "race.json"
        require(file.exists(), f"--output: must be the folder of a race, got {output}; choose it")
        return cls(output=output, **json.loads(file.read_text()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run of one side. Its figures are in a file, which its stages add to."""

    race: Race
    side: str
    switch: str  # an override that this run tries, "" for none
    rate: float
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """Return what tells this run from the others of its race."""
        return {name: value for name, value in vars(self).items() if name != "race"}

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return self.race.output / "-".join(filter(None, [self.side, self.switch, f"{self.rate:g}", f"seed{self.seed}"]))

    @property
    def checkpoint(self) -> Path:
        """Return the folder of the last weights; the peer numbers its folders by epoch."""
        return self.folder / ("checkpoint" if self.side == OURS else str(self.count_epochs() - 1))

    @property
    def file(self) -> Path:
        """Return the file of the figures."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def figures(self) -> dict[str, Any]:
        """Return the figures so far: none before the training has finished."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def add_figures(self, **figures: Any) -> None:
        """Add figures to the file."""
        write_text_atomically(self.file, json.dumps(self.figures | figures))

    def read_summary(self) -> dict[str, Any]:
        """Return the captured layers, the tokens of a step and the lengths of the documents."""
        return json.loads((self.race.documents(self.seed) / SUMMARY).read_text())

    def count_epochs(self) -> int:
        """Return enough epochs of the peer, which holds out the last document, for all steps.

        Packed batches are not always full, so an epoch may remain: it is one step at rate zero.
        """
        summary = self.read_summary()
        return math.ceil(self.race.steps / max(1, sum(summary["lengths"][:-1]) // summary["step_tokens"]))
