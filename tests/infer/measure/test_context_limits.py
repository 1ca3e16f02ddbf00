"""Prompts and answers fit in the target's context."""

import json

import pytest

from infer.config import EvaluationConf
from infer.measure.context_limits import check_prompts, resolve_prompts
from models.io.errors import UserError
from models.targets.config import TargetConf
from tests.support.models.tiny import tiny_target


def test_a_training_run_accepts_the_prompts_that_an_evaluation_accepts(tmp_path):
    """Without a limit of their own, answers take at most half of the context."""
    target = tiny_target(seed=0)
    context = target.config.max_position_embeddings
    for part in (target.model, target.tokenizer):
        part.save_pretrained(tmp_path / "target")
    conf = TargetConf(name=str(tmp_path / "target"))
    for length, fits in {context // 2: True, context // 2 + 1: False}.items():
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"ids": [1] * length}))
        typed = EvaluationConf(prompts=str(tmp_path / "prompts.jsonl"))
        for evaluation in (typed, resolve_prompts(typed, [], conf)):
            if fits:
                assert check_prompts(conf, evaluation) == length
                continue
            with pytest.raises(UserError, match=rf"got prompt 1 of {length} tokens; .*max_new_tokens={context // 2}$"):
                check_prompts(conf, evaluation)
