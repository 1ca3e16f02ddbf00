"""The drafts that an evaluation judges, read from their checkpoints."""

from pathlib import Path

from data.eval_prompts import prompts as prompt_files
from infer.checkpoints import names, own_target
from infer.config import EvalConf, EvaluationConf
from infer.context import check_prompts
from infer.measure.eval_modes import Candidate
from infer.measure.prompt_choice import settled
from models.drafts import load_draft
from models.target.target import Target


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
