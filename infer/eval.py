"""Judge drafts on held-out prompts, one or several side by side.

python -m infer.eval                        the newest finished training run
python -m infer.eval checkpoint=DIR tree=chain
python -m infer.eval checkpoint=[DIR,DIR]
"""

from pathlib import Path

from rich.console import Console

from conf.entry import entry_point
from data import prompts as prompt_files
from infer.config import EvalConf, EvaluationConf
from infer.contenders import Candidate
from infer.context import check_prompts
from infer.judge import evaluate
from infer.opening import make_writable, names, opened, own_target
from infer.prompt_choice import settled
from infer.report import write
from infer.tables import terminal_table
from models import checkpoint
from models.drafts import load_draft
from models.target import Target


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


def check(conf: EvalConf) -> None:
    """Refuse what can be known to be wrong before a model is loaded."""
    conf.tree.build()
    if conf.evaluation.prompts is not None:
        prompt_files.read(conf.evaluation.prompts)


def load(conf: EvalConf, directories: list[Path]) -> tuple[Target, list[Candidate], EvaluationConf]:
    """The target of these checkpoints, what is to be judged, and on which prompts."""
    asked = own_target(conf.target, directories)
    evaluation = settled(conf.evaluation, directories, asked)
    check_prompts(asked, evaluation)
    target = asked.build(conf.device.build())
    return target, candidates(directories, target), evaluation


@entry_point("eval", EvalConf)
def main(conf: EvalConf) -> None:
    say = Console(soft_wrap=True).print
    directories = opened(conf.checkpoint, say)
    run = Path(conf.output_dir) / conf.run_name
    check(conf)
    make_writable(run)
    target, judged, evaluation = load(conf, directories)
    report = evaluate(target, judged, tree=conf.tree, conf=evaluation, say=say)
    with checkpoint.writing(run):
        write(report, run)
    terminal_table(report)
    say(f"report: {run / 'report.html'}")


if __name__ == "__main__":
    main()
