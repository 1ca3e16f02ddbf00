"""An independent engine serves our checkpoint unchanged, and accepts the tokens that we accept.

vLLM decodes a chain greedily in fp32. Counts are compared as well as tokens: verification repairs a
misread draft, so that equal tokens alone would say nothing about the checkpoint.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from infer.engine.decode import Decoder
from infer.engine.requests import Generation
from models.drafts.eagle3 import NORM_SWITCHES
from models.drafts.registry import build_draft, load_draft
from models.losses.config import LossConf
from models.targets.config import DEMO_TARGET
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import TreeKind
from scripts.engines.comparison import Engine
from tests.support.models.tiny import demo_target

ROOT = Path(__file__).parents[2]
DRAFTED, TOKENS, SLOTS = 3, 64, 512
COUNTED = ("ids", "rounds", "drafted", "accepted")  # accepted: by position
# A short distillation: the draft has to be right often, not always.
TRAIN = [
    *(
        "device=cpu device.precision=float32 device.compile=false data.demo.num_prompts=96 data.demo.batch=96 "
        "data.demo.max_new_tokens=64 optim.steps=80 optim.rows_per_step=4 interval.eval=80 held_out.selection=1 "
        "tree=chain"
    ).split(),
    f"tree.depth={DRAFTED}",
    "evaluation.prompts_per_category=1",
    "evaluation.max_new_tokens=4",
    "evaluation.batch_sizes=[]",
]
EAGLE3 = ["draft=demo", f"draft.ttt_steps={DRAFTED}", "draft.vocab_size=null"]
# By the engine's name of the method; EAGLE-3 with its default norms, and with each norm alone.
DRAFTS = {
    "eagle3": EAGLE3,
    **{
        f"eagle3 {switch}": [*EAGLE3, *(f"draft.{name}={str(name == switch).lower()}" for name in NORM_SWITCHES)]
        for switch in NORM_SWITCHES
    },
    "eagle": ["draft=demo-eagle1"],
    # The third head is slow to learn: after 80 steps it is right in none to one of 500 rounds.
    "medusa": ["draft=demo-medusa", f"draft.heads={DRAFTED}", "optim.steps=240"],
    "draft_model": ["draft=demo-lm"],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return demo_target()


@pytest.fixture(scope="module")
def prompts(target) -> list[EvalPrompt]:
    """Return ten held-out prompts of all categories."""
    return load_eval_prompts(target.tokenizer, None, limit=3)[:10]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return one folder for all runs, so that they share the target's answers, which take longest."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module", params=DRAFTS)
def trained(request, runs) -> tuple[str, Path]:
    """Return a method's name and a checkpoint of it."""
    name = request.param.replace(" ", "-")
    own = [*DRAFTS[request.param], f"output_dir={runs}", f"run_name={name}"]
    run_command([sys.executable, "-m", "train", *TRAIN, *own])
    return request.param, runs / name / "checkpoint"


def test_vllm_gives_the_same_tokens_rounds_and_acceptance(target, prompts, trained, tmp_path):
    name, checkpoint = trained
    method = name.partition(" ")[0]
    assert_same_decoding(target, prompts, checkpoint, method)
    if name == "eagle3":
        assert_same_decoding(target, prompts, reduce_vocabulary(target, checkpoint, tmp_path), method)


def assert_same_decoding(target: Target, prompts: list[EvalPrompt], checkpoint: Path, method: str) -> None:
    ours = decode_prompts(target, prompts, checkpoint)
    theirs = serve_prompts(prompts, checkpoint, method)
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        assert own == other, f"{prompt.id} is decoded differently"
    rounds = sum(own["rounds"] for own in ours)
    for position in range(DRAFTED):
        accepted = sum(own["accepted"][position] for own in ours)
        assert 0 < accepted < rounds, f"position {position} cannot tell right from wrong"


def reduce_vocabulary(target: Target, checkpoint: Path, folder: Path) -> Path:
    """Save the draft without every eighth token of its vocabulary, used tokens among them."""
    full_draft = load_draft(checkpoint, target)
    kept_ids = torch.tensor([i for i in range(target.vocab_size) if i % 8])
    small = build_draft(replace(full_draft.conf, vocab_size=len(kept_ids)), target, loss=LossConf(), seed=0)
    small.copy_target_weights(target, kept_ids)
    weights = full_draft.state_dict()
    shared = {name: weights[name] for name in weights.keys() - {"d2t", "t2d"}}
    small.load_state_dict(shared | {"lm_head.weight": shared["lm_head.weight"][kept_ids]}, strict=False)
    small.save(folder / "reduced", target)
    return folder / "reduced"


def decode_prompts(target: Target, prompts: list[EvalPrompt], checkpoint: Path) -> list[dict]:
    draft = load_draft(checkpoint, target)
    chain = TreeConf(kind=TreeKind.chain, depth=DRAFTED).build()
    decoder = Decoder(target, draft, chain, sampling=SamplingConf(), slots=SLOTS)
    answers = []
    for prompt in prompts:
        answers += decoder.decode([prompt.ids], row_ids=[prompt.row_id], max_new_tokens=TOKENS)
    return [summarize_answer(answer) for answer in answers]


def summarize_answer(answer: Generation) -> dict:
    return {
        "ids": answer.ids,
        "rounds": len(answer.accepted),
        "drafted": sum(answer.drafted),
        "accepted": [sum(number > position for number in answer.accepted) for position in range(DRAFTED)],
    }


def serve_prompts(prompts: list[EvalPrompt], checkpoint: Path, method: str) -> list[dict]:
    engine = Engine(
        [
            str(DEMO_TARGET),
            "--eager",
            "--count",
            f"--method={method}",
            f"--draft={checkpoint}",
            f"--drafted={DRAFTED}",
            f"--slots={SLOTS}",
        ]
    )
    try:
        engine.read_line()  # It is ready.
        answers = [engine.request(prompt.ids, TOKENS) for prompt in prompts]
    finally:
        engine.close()
    return [{name: answer[name] for name in COUNTED} for answer in answers]


def run_command(command: list[str | Path]) -> None:
    """Run on one thread, as other tests may run beside it; a failure shows the command's output."""
    process = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:]
