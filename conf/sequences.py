"""Whole sequences by one name: what each command takes of `experiment=NAME`.

Folders follow from the name alone, so that each command finds what the one before it wrote:

    data.prepare -> outputs/prepare/NAME -> train -> outputs/train/NAME/checkpoint -> infer.*
"""

import functools
from pathlib import Path
from typing import Any

import yaml

from models.io.errors import require

CONF = Path(__file__).parent
WRITERS = {"outputs/prepare/NAME": "data.prepare", "outputs/train/NAME/checkpoint": "train"}  # modules by their output


def list_sequences() -> list[str]:
    """Return the names of all sequences."""
    return sorted(_load_sequences())


def read_choices(name: str, command: str) -> dict[str, str]:
    """Return the option of each group that the sequence chooses in a command, none in most.

    A plan or warm-up, such as `train_plan`, takes what its run does.

    >>> read_choices("qwen3-8b-eagle3", "train_plan")
    {'draft': 'qwen3-8b-eagle3', 'data': 'prepared'}
    """
    return _load_sequences()[name].get(_stage(command), {})


def check_experiments(overrides: list[str], command: str) -> None:
    """Raise UserError if a shipped experiment of training alone is typed for another command."""
    if _stage(command) == "train":
        return
    typed = [text.partition("=")[2] for text in overrides if text.startswith("experiment=")]
    for name in ",".join(typed).split(","):
        require(
            not (CONF / "experiment" / f"{name}.yaml").exists(),
            f"experiment: must be a whole sequence for this command, got {name}, which is of "
            f"training alone; choose one of {', '.join(list_sequences())}",
        )


@functools.cache
def _load_sequences() -> dict[str, Any]:
    return yaml.safe_load((CONF / "sequences.yaml").read_text())


def _stage(command: str) -> str:
    return command.partition("_")[0]
