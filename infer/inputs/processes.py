"""The processes of a command on checkpoints: one, or as many as its target's layers are split over."""

from pathlib import Path

from conf.entry import is_sweep
from infer.config import CheckpointConf
from infer.inputs.checkpoint_paths import resolve_target
from models.io.errors import require
from models.parallel.torchrun import get_world_size


def start_processes(conf: CheckpointConf, directories: list[Path]) -> None:
    """Run the command in the processes that split its target, and exit; return in each of them, or in a single one.

    Raise UserError for a target or draft that cannot be split, and for another number of launched processes.
    """
    tensor, launched = conf.parallel.tensor, get_world_size()
    require(
        launched in (1, tensor),
        f"parallel.tensor: must be the number of launched processes, {launched}, got {tensor}; leave the launcher out",
    )
    if tensor == 1:
        return
    check_split(conf, directories)
    if launched == 1:
        require(not is_sweep(), f"parallel.tensor: must be 1 in a sweep, got {tensor}; start the commands one by one")
        from models.parallel.launch import run_in_processes  # deferred: slow to import

        run_in_processes(tensor)


def check_split(conf: CheckpointConf, directories: list[Path]) -> None:
    """Raise UserError for a target that cannot be split, or a draft that changes it; load no weights."""
    from models.drafts.registry import find_options  # deferred: slow to import
    from models.parallel.tensor_parallel import check_heads, plan_shards
    from models.targets.pretrained import build_meta_model

    tensor = conf.parallel.tensor
    require(
        conf.device.is_native,
        f"parallel.tensor: must be 1 with device={conf.device.name.name}, got {tensor}; decode on another route",
    )
    for directory in directories:
        require(
            not find_options(directory).trains_target,
            f"parallel.tensor: must be 1 for a draft that adapts its target, got {tensor} for {directory}; "
            "choose another draft",
        )
    model = build_meta_model(resolve_target(conf.target, directories))
    check_heads(tensor, model.config.get_text_config(), remedy="choose another")
    plan_shards(model, tensor)
