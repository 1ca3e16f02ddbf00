"""The drafts of an evaluation, loaded from their checkpoints."""

from pathlib import Path

from data.eval_prompts import prompts as prompt_files
from infer.checkpoints import resolve_target, run_names
from infer.config import EvalConf, EvaluationConf
from infer.context import check_prompts
from infer.measure.eval_modes import DraftUnderTest
from infer.measure.prompt_choice import resolve_prompts
from models.drafts import load_draft
from models.drafts.base import SpeculativePair
from models.target.target import Target


def load_drafts_under_test(directories: list[Path], target: Target) -> list[DraftUnderTest]:
    """Load checkpoints, and rebuild each draft as it was before distillation."""
    drafts = []
    for name, directory in zip(run_names(directories), directories, strict=True):
        conf, draft = load_draft(directory, target)
        pair = SpeculativePair(target=target, draft=draft)
        untrained = conf.rebuild_untrained(draft, pair.verifying_target)
        drafts.append(
            DraftUnderTest(
                name=name,
                draft=draft,
                untrained=untrained,
                target=pair.adapted_target,
                directory=directory,
            )
        )
    return drafts


def load_draft_under_test(directory: Path, target: Target) -> DraftUnderTest:
    """Load a single checkpoint."""
    return load_drafts_under_test([directory], target)[0]


def check_eval_config(conf: EvalConf) -> None:
    """Check what can be checked before a model is loaded; raise UserError otherwise."""
    conf.tree.build()
    if conf.evaluation.prompts is not None:
        prompt_files.read_prompt_rows(conf.evaluation.prompts)


def load_evaluation(
    conf: EvalConf, directories: list[Path]
) -> tuple[Target, list[DraftUnderTest], EvaluationConf]:
    """Load the checkpoints' target and drafts; return them with the resolved configuration."""
    target_conf = resolve_target(conf.target, directories)
    evaluation = resolve_prompts(conf.evaluation, directories, target_conf)
    check_prompts(target_conf, evaluation)
    target = target_conf.build(conf.device.build())
    return target, load_drafts_under_test(directories, target), evaluation
