"""Choose the prompts that drafts are evaluated or tuned on if the user names no prompts.

A training run stores the prompts that it held out of its data beside its checkpoint
(`data/mixture/held_out_rows.py`); the demo has its own. There is no other default: without either
of them the user must name a file.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from data.config import DEMO, DataSource
from data.demo.prompts import training_prompts
from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from data.mixture.held_out_rows import FINAL_FILE
from infer.config import DEFAULT_NEW_TOKENS, DEMO_NEW_TOKENS, EvaluationConf
from models.errors import require
from models.target.config import TargetConf
from models.target.pretrained import read_context_length

# The seed of the demo's calibration prompts. It differs from the default of data.seed (0), which
# selects the prompts that drafts are trained on.
CALIBRATION_SEED = 24
RUN_CONFIG = "config.yaml"  # file name of a training run's config, beside its checkpoint


def resolve_prompts(
    conf: EvaluationConf, directories: Sequence[Path], target: TargetConf
) -> EvaluationConf:
    """Return `conf` with its prompts and its limit of new tokens filled in; load no model.

    Raise UserError if no prompts can be chosen.
    """
    prompts = conf.prompts or find_held_out_file(
        directories, target, FINAL_FILE, key="evaluation.prompts"
    )
    max_new_tokens = max_answer_tokens(conf, read_context_length(target), demo=prompts == DEMO)
    return replace(conf, prompts=prompts, max_new_tokens=max_new_tokens)


def max_answer_tokens(conf: EvaluationConf, context: int | None, *, demo: bool) -> int:
    """Return the limit of an answer in tokens.

    This is the configured limit, else the default or half of the target's `context`, whichever is
    less.
    """
    if conf.max_new_tokens is not None:
        return conf.max_new_tokens
    default = DEMO_NEW_TOKENS if demo else DEFAULT_NEW_TOKENS
    return default if context is None else min(default, context // 2)


def find_held_out_file(
    directories: Sequence[Path], target: TargetConf, file: str, *, key: str
) -> str:
    """Return the path of the prompts that the runs of these checkpoints held out.

    It is `demo` if they are the demo's. Raise UserError if a run left no such file, or if the files
    of several runs differ.
    """
    paths = {directory: directory.resolve().parent / file for directory in directories}
    held_out = {directory: path for directory, path in paths.items() if path.exists()}
    missing = [directory for directory in directories if directory not in held_out]
    is_demo_target = target.name == DEMO and target.path is None
    for directory in missing:
        require(
            is_demo_target or _read_data_conf(directory).get("source") == DataSource.demo.name,
            f"{key}: must be named for a draft whose run kept no prompts of its own, got null "
            f"and no {paths[directory]}; give {key}=FILE",
        )
    listed = ", ".join(str(held_out.get(directory, "the demo's")) for directory in directories)
    require(
        len({path.read_bytes() for path in held_out.values()}) + bool(missing) <= 1,
        f"{key}: must be named for drafts whose runs held out different prompts, got null and "
        f"{listed}; give {key}=FILE",
    )
    return str(next(iter(held_out.values()), DEMO))


def load_calibration_prompts(
    tokenizer: Any, path: str, count: int, vocab_size: int | None = None
) -> list[EvalPrompt]:
    """Load the prompts of a file, or `count` of the demo's training prompts for `demo`."""
    if path != DEMO:
        return load_eval_prompts(tokenizer, path, limit=None, key="prompts", vocab_size=vocab_size)
    return [
        EvalPrompt(id=p.id, category=p.category, ids=tokenizer(p.text)["input_ids"])
        for p in training_prompts(count, seed=CALIBRATION_SEED)
    ]


def read_longest_row(directory: Path) -> int | None:
    """Return the length of the draft's longest training row; None if its run does not record it."""
    length = _read_data_conf(directory).get("row_length")
    return length if isinstance(length, int) else None


def _read_data_conf(directory: Path) -> dict[str, Any]:
    """Return the data section of the run's config; empty if the config cannot be read."""
    try:
        conf = yaml.safe_load((directory.resolve().parent / RUN_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    data = conf.get("data") if isinstance(conf, dict) else None
    return data if isinstance(data, dict) else {}
