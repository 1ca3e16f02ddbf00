"""The inputs of a command on checkpoints, checked without a model, so that a mistake is answered at once."""

from pathlib import Path

from data.eval_prompts.prompts import PROMPTS_KEY, read_prompt_rows
from infer.inputs.checkpoint_paths import open_checkpoints
from models.trees.config import TreeConf


def open_inputs(
    paths: list[str] | None, tree: TreeConf, prompts: str | None, *, prompts_key: str = PROMPTS_KEY
) -> list[Path]:
    """Return the directories of checkpoints; read these, a tree and a file of prompts; raise UserError for mistakes."""
    directories = open_checkpoints(paths)
    tree.build()
    if prompts is not None:
        read_prompt_rows(prompts, key=prompts_key)
    return directories
