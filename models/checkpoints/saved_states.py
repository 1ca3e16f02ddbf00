"""The saved states of a training run: where its folder has them, and what each tells of the run."""

import json
from pathlib import Path
from typing import Any

from models.io.errors import UserError, first_line

FIRST_STAGE_FOLDER = "first_stage"  # in the folder of the run that starts from it
REPLACED_FOLDER = "replaced"  # of a run that is started over: the files of the one before
STATES_FOLDER, PROGRESS_FILE = "state", "progress.json"


def find_newest_state(run_folder: Path) -> Path | None:
    """Return the complete state of the latest step, or None."""
    states = (run_folder / STATES_FOLDER).glob("*")
    return max((path for path in states if path.name.isdecimal()), default=None)  # others are a user's


def read_progress_file(state: Path) -> dict[str, Any]:
    """Return the progress that a state records, and the config of its run."""
    try:
        return json.loads((state / PROGRESS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"run_name: must name a run whose state is intact, got {state / PROGRESS_FILE} ({first_line(error)}); copy "
            "it again, or remove that state to begin anew"
        ) from error
