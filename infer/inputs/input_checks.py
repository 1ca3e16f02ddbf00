"""Checks of a command's inputs that take no model, so that a mistake is answered at once."""

from data.eval_prompts.prompts import PROMPTS_KEY, read_prompt_rows
from models.trees.config import TreeConf


def check_inputs(tree: TreeConf, prompts: str | None, *, key: str = PROMPTS_KEY) -> None:
    """Read a tree and a file of prompts, before a model is loaded; raise UserError if they fail."""
    tree.build()
    if prompts is not None:
        read_prompt_rows(prompts, key=key)
