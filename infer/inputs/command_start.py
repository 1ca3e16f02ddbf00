"""The start of a command on checkpoints: its inputs are checked, and the processes that split its target run it."""

from dataclasses import replace
from pathlib import Path

from conf.entry import is_sweep
from conf.typed_text import quote
from data.eval_prompts.prompts import PROMPTS_KEY, read_prompt_rows
from infer.config import CheckpointConf
from infer.inputs.checkpoint_paths import find_tuned_tree, open_checkpoints, resolve_target
from models.command_processes import start_processes
from models.io.console import print_line
from models.io.errors import require
from models.trees.config import TUNED


def start_command(conf: CheckpointConf, prompts: str | None, *, prompts_key: str = PROMPTS_KEY) -> list[Path]:
    """Return the checkpoints' directories, in each of the processes that split the target, or in a single one.

    Checkpoints, tree and a file of prompts are read before, so that a mistake is answered at once: raise UserError.
    The main process prints which checkpoints they are.
    """
    directories = open_checkpoints([conf.checkpoint] if isinstance(conf.checkpoint, str) else conf.checkpoint)
    if conf.tree.file == TUNED:
        conf.tree = replace(conf.tree, file=str(find_tuned_tree(directories)))
    conf.tree.build()
    if prompts is not None:
        read_prompt_rows(prompts, key=prompts_key)
    if conf.parallel.tensor > 1:
        from models.drafts.registry import find_options  # deferred: slow to import

        for directory in directories:
            require(
                not find_options(directory).trains_target,
                f"parallel.tensor: must be 1 for a draft that adapts its target, got {conf.parallel.tensor} for "
                f"{directory}; choose another draft",
            )
    # Another run may finish before the processes look for the newest.
    overrides = [] if conf.checkpoint is not None else [f"checkpoint={quote(str(directories[0]))}"]
    target = resolve_target(conf.target, directories)
    start_processes(conf.parallel, conf.device, target, is_sweep=is_sweep(), overrides=overrides)
    print_line(f"checkpoint: {', '.join(map(str, directories))}")
    return directories
