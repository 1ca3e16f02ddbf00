"""The processes of a command on checkpoints, whose drafts must leave a split target as it is."""

from pathlib import Path

from conf.entry import is_sweep
from conf.typed_text import quote
from infer.config import CheckpointConf
from infer.inputs.checkpoint_paths import resolve_target
from models.command_processes import start_processes
from models.io.console import print_line
from models.io.errors import require


def start_checkpoint_processes(conf: CheckpointConf, directories: list[Path]) -> None:
    """Run the command in the processes that split its target, and exit; return in each of them, or in a single one.

    The main process prints which checkpoints they are.
    """
    if conf.parallel.tensor > 1:
        from models.drafts.registry import find_options  # deferred: slow to import

        for directory in directories:
            require(
                not find_options(directory).trains_target,
                f"parallel.tensor: must be 1 for a draft that adapts its target, got {conf.parallel.tensor} for "
                f"{directory}; choose another draft",
            )
    start_processes(
        conf.parallel,
        conf.device,
        resolve_target(conf.target, directories),
        is_sweep=is_sweep(),
        # Another run may finish before the processes look for the newest.
        overrides=[] if conf.checkpoint is not None else [f"checkpoint={quote(str(directories[0]))}"],
    )
    print_line(f"checkpoint: {', '.join(map(str, directories))}")
