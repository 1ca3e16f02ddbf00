"""Checkpoints as arguments of a command: their paths, run names and target."""

import logging
import os
from dataclasses import replace
from pathlib import Path

from conf.entry import command_that_writes
from infer.config import OWN_TARGET
from models.checkpoints import checkpoint_files
from models.checkpoints.saved_states import FIRST_STAGE_FOLDER, REPLACED_FOLDER, find_newest_state, read_progress_file
from models.io.errors import UserError, first_line, require
from models.io.files import PARTIAL_SUFFIX
from models.io.tracking import TrackedRun
from models.targets.config import TargetConf
from models.trees.config import TUNED

log = logging.getLogger(__name__)


def open_checkpoints(paths: list[str] | None) -> list[Path]:
    """Check the checkpoints at `paths`, or the newest run's; return their directories.

    Raise UserError if one cannot be read or they do not go together. No weights are loaded.
    """
    directories = [Path(path) for path in paths or [find_newest_run()]]
    for directory in directories:
        command = command_that_writes(directory)
        require(
            directory.exists() or command is None,
            f"checkpoint: must be a folder, got {directory}, which is not there; run `{command}` first",
        )
        checkpoint_files.read_config(directory)
    by_target = {
        digest: path
        for path in directories
        if (digest := checkpoint_files.read_metadata(path).get(checkpoint_files.TARGET_HASH_KEY))
    }
    listed = ", ".join(f"{path} of {digest[:12]}" for digest, path in by_target.items())
    require(
        len(by_target) <= 1,
        f"checkpoint: drafts side by side must be of one target, got {listed}; evaluate them one by one",
    )
    run_names(directories)  # raises UserError if a run is listed twice
    return directories


def find_newest_run(root: Path = Path("outputs/train")) -> Path:
    """Return the checkpoint of the newest finished training run; raise UserError if none exists."""
    checkpoints = list_finished_checkpoints(root)
    require(
        bool(checkpoints),
        f"checkpoint: no finished run under {root}, got null; run `python -m train` or give checkpoint=DIR",
    )
    return checkpoints[0]


def find_tuned_tree(directories: list[Path]) -> Path:
    """Return the tree file that `tune=true` left beside a single checkpoint; raise UserError if there is none."""
    require(len(directories) == 1, f"tree: must not be tuned for {len(directories)} checkpoints; give one")
    run = directories[0].resolve().parent
    files = sorted(run.glob(f"*-{TUNED}.json"))
    require(
        bool(files),
        f"tree: tuned needs the tree that tune=true chose for this draft, got none in {run}; run python -m infer.tune, "
        "and take its tree.file",
    )
    return files[0]


def list_finished_checkpoints(root: Path = Path("outputs/train")) -> list[Path]:
    """Return the checkpoints of the finished training runs, the newest first."""
    of_others = {FIRST_STAGE_FOLDER, REPLACED_FOLDER, REPLACED_FOLDER + PARTIAL_SUFFIX}
    times: dict[Path, float] = {}
    for folder, names, _ in os.walk(root, followlinks=True):
        if "checkpoint" not in names:
            names[:] = [name for name in names if name not in of_others]
            continue
        names.clear()
        try:
            if file := find_last_file(Path(folder)):
                times[Path(folder)] = file.stat().st_mtime
        except (OSError, UserError) as error:  # a run in progress has just replaced its state
            log.warning("%s is passed over: %s", folder, first_line(error))
    return [run / "checkpoint" for run in sorted(times, key=lambda run: -times[run])]


def find_last_file(run: Path) -> Path | None:
    """Return what a finished training wrote last: its report, or with measure=false its last state; None before."""
    report, state = run / "report.json", find_newest_state(run)
    if report.exists() or state is None:
        return report if report.exists() else None
    saved = read_progress_file(state)
    if saved["config"].get("measure", True) or saved["progress"]["step"] < saved["progress"]["steps"]:
        return None
    return state


def find_tracked_run(directories: list[Path]) -> TrackedRun | None:
    """Return the W&B run of the finished training that left a single checkpoint, or None.

    Drafts side by side belong to no training, and one that goes on writes its W&B run itself.
    """
    run = directories[0].resolve().parent
    state = find_newest_state(run)
    if len(directories) > 1 or state is None or find_last_file(run) is None:
        return None
    saved = read_progress_file(state)
    if (tracker := saved["progress"].get("tracker")) is None:
        return None
    conf = saved["config"]
    return TrackedRun(id=tracker, project=conf["log.project"], entity=conf.get("log.entity"))


def resolve_target(conf: TargetConf, directories: list[Path]) -> TargetConf:
    """Return the configured target; `own` becomes the one that the checkpoints name, at its revision.

    Raise UserError if they name none, as published drafts do.
    """
    if conf.name != OWN_TARGET:
        return conf
    origins = map(checkpoint_files.read_metadata, directories)
    origin = next((origin for origin in origins if origin.get("target_name")), {})
    name = origin.get("target_name") or conf.path
    require(
        name is not None,
        f"target: must be given for a draft that records none, got null for {', '.join(map(str, directories))}; set "
        "target=NAME or target.path=DIR",
    )
    return replace(conf, name=name, revision=conf.revision or origin.get("target_revision"))


def run_names(directories: list[Path]) -> list[str]:
    """Return a name per run: its folder, and of namesakes the path below the folder that holds them all.

    Raise UserError if a run is listed twice.

    >>> demos = [Path("/a/out/demo/checkpoint"), Path("/b/out/demo/checkpoint")]
    >>> run_names([*demos, Path("/b/medusa")])
    ['a/out/demo', 'b/out/demo', 'medusa']
    """
    paths = [directory.resolve() for directory in directories]  # `.` and `..` have no names
    runs = [path.parent if path.name == "checkpoint" else path for path in paths]
    for run, directory in zip(runs, directories, strict=True):
        require(runs.count(run) == 1, f"checkpoint: no run may be given twice, got {directory} again")
    parents = {name: [run.parent for run in runs if run.name == name] for name in {run.name for run in runs}}
    return [run.relative_to(os.path.commonpath(parents[run.name])).as_posix() for run in runs]
