"""A check that a draft was not trained on the prompts that evaluate it (docs/report.md, Contamination).

It misses reworded questions, and prompts in the middle of a longer text.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.eval_prompts.prompts import EvalPrompt
from data.sources.text_hashes import prompt_hashes

PROMPT_HASHES_FILE = "training_prompts.npy"  # uint64, beside report.json and checkpoint/


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """The held-out prompts that were trained on; `reason` explains a check that did not run."""

    checked: bool
    count: int = 0
    ids: list[str] = field(default_factory=list)
    reason: str = ""


def check_contamination(prompts: list[EvalPrompt], checkpoint_dir: Path) -> Contamination:
    """Return the held-out prompts that occur in the training data of the checkpoint's run."""
    file = checkpoint_dir.resolve().parent / PROMPT_HASHES_FILE
    try:
        training_hashes = set(np.load(file, allow_pickle=False).tolist())
    except (OSError, ValueError, EOFError):
        return Contamination(checked=False, reason=f"the run left no readable {PROMPT_HASHES_FILE}")
    ids = [
        prompt.id
        for prompt in prompts
        if training_hashes.intersection([prompt.first_question, *prompt_hashes(prompt.text, prompt.text)])
    ]
    return Contamination(checked=True, count=len(ids), ids=ids)
