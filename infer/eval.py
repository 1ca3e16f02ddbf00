"""Judge drafts on held-out prompts, one or several side by side.

python -m infer.eval                        the newest finished training run
python -m infer.eval checkpoint=DIR tree=chain
python -m infer.eval checkpoint=[DIR,DIR]
"""

import logging
import tempfile
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console

from conf.entry import entry_point
from data import prompts as prompt_files
from infer.config import OWN, EvalConf
from infer.contenders import Candidate
from infer.judge import evaluate
from infer.report import write
from infer.tables import terminal_table
from models import checkpoint
from models.drafts import load_draft
from models.errors import UserError
from models.target import Target


def newest_run(root: Path = Path("outputs/train")) -> Path:
    """Checkpoint of the newest finished training run. Raises UserError where there is none."""
    runs = sorted(root.glob("*/report.json"), key=lambda report: report.stat().st_mtime)
    if not runs:
        raise UserError(
            f"checkpoint: no finished run under {root}, got null; "
            "run `python -m train` or give checkpoint=DIR"
        )
    return runs[-1].parent / "checkpoint"


def candidates(directories: list[Path], target: Target) -> list[Candidate]:
    """Read checkpoints, and rebuild each draft as it was before distillation."""
    found = []
    for name, directory in zip(names(directories), directories, strict=True):
        conf, draft = load_draft(directory, target)
        own = draft.verifier(target)
        before = conf.untrained(draft, own or target)
        found.append(
            Candidate(name=name, draft=draft, untrained=before, target=own, directory=directory)
        )
    return found


def candidate(directory: Path, target: Target) -> Candidate:
    """One checkpoint alone."""
    return candidates([directory], target)[0]


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


def check(conf: EvalConf, directories: list[Path], run: Path | None) -> None:
    """Refuse what can be known to be wrong before a model is loaded."""
    conf.tree.build()
    for directory in directories:
        checkpoint.read_config(directory)
    _check_one_target(directories)
    names(directories)
    if conf.evaluation.prompts is not None:
        prompt_files.read(conf.evaluation.prompts)
    if run is None:
        return
    with checkpoint.writing(run):
        run.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run).close()


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


def let_warnings_through() -> None:
    """And which device is taken. Hydra switches off every logger that it finds, all but errors."""
    logging.basicConfig(format="%(message)s")
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("models.device").setLevel(logging.INFO)
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("data", "infer", "models"):
            logging.getLogger(name).disabled = False


def load(conf: EvalConf, directories: list[Path]) -> tuple[Target, list[Candidate]]:
    """The target of these checkpoints, and what is to be judged."""
    if conf.target.name == OWN:
        said = [checkpoint.read_metadata(directory).get("target_name") for directory in directories]
        conf.target = replace(conf.target, name=next(filter(None, said), "demo"))
    target = conf.target.build(conf.device.build())
    return target, candidates(directories, target)


@entry_point("eval", EvalConf)
def main(conf: EvalConf) -> None:
    let_warnings_through()
    directories = [Path(c) for c in conf.checkpoint or [newest_run()]]
    say = Console(soft_wrap=True).print
    say(f"checkpoint: {', '.join(map(str, directories))}")
    run = Path(conf.output_dir) / conf.run_name
    check(conf, directories, run)
    target, judged = load(conf, directories)
    report = evaluate(target, judged, tree=conf.tree, conf=conf.evaluation, say=say)
    with checkpoint.writing(run):
        write(report, run)
    terminal_table(report)
    say(f"report: {run / 'report.html'}")


if __name__ == "__main__":
    main()
