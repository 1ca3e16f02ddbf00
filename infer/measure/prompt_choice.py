"""Decide on which prompts drafts are judged or tuned, where the user names none.

A training run leaves the prompts that it held out of its data beside its checkpoint
(`data/mixture/held_out_rows.py`); the demo has its own. Nothing else is taken in silence.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from data.config import DEMO, Source
from data.demo.prompts import training_prompts
from data.eval_prompts.prompts import EvalPrompt, held_out
from data.mixture.held_out_rows import FINAL
from infer.config import DEMO_TOKENS, OWN_TOKENS, EvaluationConf
from models.errors import UserError
from models.target.target import Target, TargetConf

SEED = 24  # of the demo's calibration prompts; data.seed, 0, picks those that drafts learn from
RUN_CONFIG = "config.yaml"  # of a training run, beside its checkpoint


def settled(
    conf: EvaluationConf, directories: Sequence[Path], target: TargetConf
) -> EvaluationConf:
    """Name the prompts, and how many tokens an answer has at most. Loads no model."""
    prompts = conf.prompts or own_prompts(directories, target, FINAL, key="evaluation.prompts")
    tokens = answer_tokens(conf, target.source.context(), demo=prompts == DEMO)
    return replace(conf, prompts=prompts, max_new_tokens=tokens)


def answer_tokens(conf: EvaluationConf, context: int | None, *, demo: bool) -> int:
    """Tokens of an answer at most: as asked for, else at most half of what the target can read."""
    if conf.max_new_tokens is not None:
        return conf.max_new_tokens
    usual = DEMO_TOKENS if demo else OWN_TOKENS
    return usual if context is None else min(usual, context // 2)


def own_prompts(directories: Sequence[Path], target: TargetConf, file: str, *, key: str) -> str:
    """The file that the runs of these checkpoints left, the same for all; `demo` for the demo's.

    Raises UserError where there is none, or where they differ.
    """
    found = {directory: _beside(directory) / file for directory in directories}
    kept = {directory: path for directory, path in found.items() if path.exists()}
    without = [directory for directory in directories if directory not in kept]
    for directory in without:
        if not _is_the_demos(target, directory):
            raise UserError(
                f"{key}: must be named for a draft whose run kept no prompts of its own, got null "
                f"and no {found[directory]}; give {key}=FILE"
            )
    if len({path.read_bytes() for path in kept.values()}) + bool(without) > 1:
        each = ", ".join(str(kept.get(directory, "the demo's")) for directory in directories)
        raise UserError(
            f"{key}: must be named for drafts that were held out different prompts, got null and "
            f"{each}; give {key}=FILE"
        )
    return str(next(iter(kept.values()), DEMO))


def calibration_prompts(target: Target, path: str, count: int) -> list[EvalPrompt]:
    """Those of the file, or `count` of the demo's training prompts: never the held-out ones."""
    if path != DEMO:
        return held_out(target.tokenizer, path, limit=None, key="prompts")
    return [
        EvalPrompt(id=p.id, category=p.category, ids=target.tokenizer(p.text)["input_ids"])
        for p in training_prompts(count, seed=SEED)
    ]


def longest_row(directory: Path) -> int | None:
    """Return the length of the draft's longest training row, where its run records it."""
    length = _data_of(directory).get("length")
    return length if isinstance(length, int) else None


def _is_the_demos(target: TargetConf, directory: Path) -> bool:
    itself = target.name == DEMO and target.path is None
    return itself or _data_of(directory).get("source") == Source.demo.name


def _data_of(directory: Path) -> dict[str, Any]:
    """What the run of a checkpoint says of its data; nothing of one that came without its run."""
    try:
        conf = yaml.safe_load((_beside(directory) / RUN_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    data = conf.get("data") if isinstance(conf, dict) else None
    return data if isinstance(data, dict) else {}


def _beside(directory: Path) -> Path:
    return directory.resolve().parent
