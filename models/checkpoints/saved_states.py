"""The saved states of a training run: where its folder has them, and what each tells of the run."""

import json
from pathlib import Path
from typing import Any

from models.io.files import PARTIAL_SUFFIX

FIRST_STAGE_FOLDER = "first_stage"  # in the folder of the run that starts from it
REPLACED_FOLDER = "replaced"  # of a run that is started over: the files of the one before
STATES_FOLDER, PROGRESS_FILE = "state", "progress.json"


def find_newest_state(run_folder: Path) -> Path | None:
    """Return the complete state of the latest step, or None."""
    states = (run_folder / STATES_FOLDER).glob("*")
    return max((path for path in states if path.suffix != PARTIAL_SUFFIX), default=None)


def read_progress_file(state: Path) -> dict[str, Any]:
    """Return the progress that a state records, and the config of its run."""
    return json.loads((state / PROGRESS_FILE).read_text())
