"""On the demo, speculative decoding gives the answers of transformers' `generate`, token for token."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from infer.engine.decode import Decoder
from models.drafts.registry import load_draft
from models.targets.target import Target
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import chain, demo_target, mixed, static, tree

pytestmark = pytest.mark.slow
NEW = 64
TRAIN = (
    "device=cpu device.precision=float32 device.compile=false data.demo.num_prompts=96 data.demo.batch=96 "
    "data.demo.max_new_tokens=64 optim.steps=60 optim.rows_per_step=8 interval.eval=60 held_out.selection=1 "
    "evaluation.prompts_per_category=1 evaluation.max_new_tokens=4"
).split()


@pytest.fixture(scope="module")
def target() -> Target:
    return demo_target()


@pytest.fixture(scope="module")
def prompts(target) -> list[EvalPrompt]:
    return load_eval_prompts(target.tokenizer, None, limit=None)


@pytest.fixture(scope="module")
def theirs(target, prompts) -> list[list[int]]:
    """Return the answers of transformers, with their end-of-text token."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        full_mask = torch.ones_like(ids)
        output = target.model.generate(ids, attention_mask=full_mask, max_new_tokens=NEW, do_sample=False)
        answers.append(output[0, len(prompt.ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    """Return a draft that was distilled for a minute, so that it is right often, but not always."""
    runs = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "train", *TRAIN, f"output_dir={runs}", "run_name=short"]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    return load_draft(runs / "short" / "checkpoint", target)


SHAPES = {"chain": chain(4), "static": static(), "dynamic": tree(), "mixed": mixed()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_held_out_prompt_is_answered_as_by_transformers(target, prompts, theirs, draft, shape):
    slots = max(len(prompt.ids) for prompt in prompts) + NEW
    decoder = Decoder(target, draft, shape, sampling=SamplingConf(), slots=slots)
    generations = [
        decoder.decode([prompt.ids], row_ids=[prompt.row_id], max_new_tokens=NEW, eos_ids=target.eos_ids)[0]
        for prompt in prompts
    ]
    different = [p.id for p, d, t in zip(prompts, generations, theirs, strict=True) if d.ids != t]
    assert different == []
    accepted = sum(sum(row.accepted) for row in generations)
    rounds = sum(len(row.accepted) for row in generations)
    assert 0.2 < accepted / rounds < shape.depth - 0.2  # otherwise it would say nothing about trees
