"""The saved states of a training run: where its folder has them, and what each tells of the run."""

import json
from pathlib import Path
from typing import Any

from models.io.files import PARTIAL_SUFFIX

STATES_FOLDER, PROGRESS_FILE = "state", "progress.json"


def list_complete_states(run_folder: Path) -> list[Path]:
    """Return the states that are completely written, in no particular order."""
    states = (run_folder / STATES_FOLDER).glob("*")
    return [path for path in states if path.suffix != PARTIAL_SUFFIX]


def find_newest_state(run_folder: Path) -> Path | None:
    """Return the complete state of the latest step, or None."""
    return max(list_complete_states(run_folder), default=None)


def read_progress_file(state: Path) -> dict[str, Any]:
    """Return the progress that a state records, and the config of its run."""
    return json.loads((state / PROGRESS_FILE).read_text())
