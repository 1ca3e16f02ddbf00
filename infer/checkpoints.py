"""How a command opens checkpoints: which, under what names, of which target; where it writes."""

import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from infer.config import OWN
from models import checkpoint
from models.errors import UserError
from models.lock import hold
from models.target.target import TargetConf


def opened(given: list[str] | None, say: Callable[[str], None]) -> list[Path]:
    """The checkpoints that were given, or that of the newest run; refused where they do not fit.

    Nothing is loaded yet.
    """
    let_warnings_through()
    directories = [Path(one) for one in given or [newest_run()]]
    say(f"checkpoint: {', '.join(map(str, directories))}")
    for directory in directories:
        checkpoint.read_config(directory)
    _check_one_target(directories)
    names(directories)
    return directories


def let_warnings_through() -> None:
    """And which device is taken. Hydra switches off every logger that it finds, all but errors."""
    logging.basicConfig(format="%(message)s")
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("models.device").setLevel(logging.INFO)
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("data", "infer", "models"):
            logging.getLogger(name).disabled = False


def newest_run(root: Path = Path("outputs/train")) -> Path:
    """Checkpoint of the newest finished training run. Raises UserError where there is none."""
    runs = sorted(root.glob("*/report.json"), key=lambda report: report.stat().st_mtime)
    if not runs:
        raise UserError(
            f"checkpoint: no finished run under {root}, got null; "
            "run `python -m train` or give checkpoint=DIR"
        )
    return runs[-1].parent / "checkpoint"


def own_target(conf: TargetConf, directories: list[Path]) -> TargetConf:
    """The target that was asked for; `own` is the one that a checkpoint says it is of."""
    if conf.name != OWN:
        return conf
    said = [checkpoint.read_metadata(directory).get("target_name") for directory in directories]
    return replace(conf, name=next(filter(None, said), "demo"))


def make_writable(run: Path) -> None:
    """Refuse a folder that cannot be written to, or that another process writes to."""
    with checkpoint.writing(run):
        run.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run).close()
        hold(run)


def names(directories: list[Path]) -> list[str]:
    """What each run is called: its folder, behind the nearest folders that tell namesakes apart.

    >>> names([Path("/a/out/demo/checkpoint"), Path("/b/out/demo/checkpoint"), Path("/b/medusa")])
    ['a/demo', 'b/demo', 'medusa']
    """
    whole = [directory.resolve() for directory in directories]  # `.` and `..` have no names
    runs = [path.parent if path.name == "checkpoint" else path for path in whole]
    for run, directory in zip(runs, directories, strict=True):
        if runs.count(run) > 1:
            raise UserError(f"checkpoint: no run may be given twice, got {directory} again")
    alike = [[other for other in runs if other.name == run.name] for run in runs]
    return [_tell_apart(paths)[run] for run, paths in zip(runs, alike, strict=True)]


def _tell_apart(paths: list[Path]) -> dict[Path, str]:
    """Their names; where they are the same, with those folders above in which they differ."""
    called = {path: path.name for path in paths}
    for above in zip_longest(*(path.parts[-2:0:-1] for path in paths), fillvalue=""):
        if len(set(called.values())) == len(paths):
            break
        if len(set(above)) > 1:
            called = {
                path: f"{folder}/{called[path]}".strip("/")
                for path, folder in zip(paths, above, strict=True)
            }
    return called


def _check_one_target(directories: list[Path]) -> None:
    of: dict[str, Path] = {}
    for directory in directories:
        if found := checkpoint.read_metadata(directory).get(checkpoint.TARGET_HASH):
            of[found] = directory
    if len(of) > 1:
        each = ", ".join(f"{path} of {found[:12]}" for found, path in of.items())
        raise UserError(
            f"checkpoint: drafts side by side must be of one target, got {each}; "
            "evaluate them one by one"
        )
