"""Several processes take the memory that a plan states, as PyTorch's allocator measures it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.data.chat import save
from tests.support.models.tiny import CPU
from tests.support.reports.memory_run import KINDS, PROMPT, build_conf, build_target
from tests.support.reports.planned import GENEROUS
from tests.support.runs import launch_script
from train.config.run import TrainConf
from train.optim import trained_parameters
from train.planning.fake_process import (
    FROZEN,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    SPLIT_HEADS,
    START,
    TARGET,
    TRAINED,
    persistent_memory,
)
from train.planning.layout import ProcessLayout, build_layout
from train.planning.run_plan import build_models
from train.planning.trace import DRAFT_PASS, trace_run

CASES = (
    "eagle3,replicated,fp32,1",
    "eagle3,replicated,bf16,2",
    "eagle3,sharded,fp32,1",
    "eagle3,sharded,bf16,2",
    "medusa,sharded,bf16,1",
    "draft model,sharded,bf16,2",
    "eagle3,split heads,fp32,1",
    "medusa,split heads,fp32,1",
    "medusa,split heads,bf16,1",
    "eagle3,split,fp32,1",
    "eagle3,split,bf16,2",
    "medusa,split,fp32,1",
    "draft model,split,bf16,1",
    "eagle3,sharded,bf16,1,optim=muon",
    "eagle3,all sharded,fp32,1",
    "eagle3,all sharded,bf16,1",
    "eagle3,tied sharded,bf16,1",
)


@pytest.fixture(scope="module")
def bytes_by_case(tmp_path_factory) -> dict[str, tuple[int, int]]:
    folder = tmp_path_factory.mktemp("memory")
    launch_script("../reports/memory_run.py", folder, *CASES, processes=4)
    return json.loads((folder / "bytes.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_four_processes_takes_the_planned_memory(bytes_by_case, case):
    """The profiler misses what gloo's threads free, of a shared draft or target: measured figures may be too high.

    The plan counts the last two tokens of a row of 128, 1.6 %. They have no weight, so that a CPU leaves them out.
    """
    measured, planned = bytes_by_case[case]
    missed = 0.01 if "replicated" in case else 0.05
    assert (1 - missed) * measured <= planned <= (1 + 2 / 128) * measured


@pytest.mark.slow
def test_a_shared_draft_takes_less_than_one_that_every_process_holds(bytes_by_case):
    (replicated, _), (sharded, _) = (bytes_by_case[f"eagle3,{weights},fp32,1"] for weights in ("replicated", "sharded"))
    assert sharded < replicated


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_what_8_and_64_processes_hold_follows_from_what_4_hold(kind, tmp_path):
    save(build_target(CPU), tmp_path)
    alone, fours, eights, many = (count_held_bytes(kind, n, tmp_path) for n in (1, 4, 8, 64))
    for part in (TRAINED, OPTIMIZER):
        assert alone[part] == pytest.approx(4 * fours[part], rel=1e-3)
    for part in (TARGET, FROZEN, TRAINED, OPTIMIZER):
        shared = 8 * (fours[part] - eights[part])  # the rest is whole on each
        assert many[part] == pytest.approx(fours[part] - shared / 4 + shared / 64, rel=1e-3)
    assert many[TARGET] < eights[TARGET] < fours[TARGET] < alone[TARGET]


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_processes_gather_the_same_weights_however_many_share_them(kind, tmp_path):
    save(build_target(CPU), tmp_path)
    for processes in (4, 64):
        conf, layout = build_sharded_run(kind, processes, tmp_path)
        phases = trace_run(conf, *build_models(conf, CPU.dtype), layout, prompt_tokens=PROMPT)
        held = persistent_memory(conf, *build_models(conf, CPU.dtype), layout)
        assert phases[DRAFT_PASS].peak_bytes[GATHERED] == held[GATHERED] > 0


def test_on_the_xla_route_processes_share_masters_and_moments_and_hold_weights_in_bf16(tmp_path):
    save(build_target(CPU), tmp_path)
    words = ("device=xla", "parallel.draft=sharded", "optim.rows_per_step=4", f"target.path={tmp_path}")
    conf = build_conf(*KINDS["eagle3"], *words)
    layout = build_layout(conf, replace(GENEROUS, chips=1, cores=4), 4, 1)
    weights = sum(p.numel() for p in trained_parameters(build_models(conf, torch.bfloat16)[1]))
    held = persistent_memory(conf, *build_models(conf, torch.bfloat16), layout)
    assert held[TRAINED] == held[GRADIENTS] == 2 * weights
    assert held[OPTIMIZER] == pytest.approx((4 + 8) * weights / 4, rel=1e-3)
    start = trace_run(conf, *build_models(conf, torch.bfloat16), layout, prompt_tokens=PROMPT)[START].peak_bytes
    assert start[TRAINED] == 4 * weights  # a saved state is loaded before processes share it
    assert start[OPTIMIZER] == pytest.approx(8 * weights, rel=1e-3)


def test_no_process_gathers_a_head_that_is_split(tmp_path):
    save(build_target(CPU), tmp_path)
    split = "parallel.split_heads=true"
    gathering = count_held_bytes("medusa", 8, tmp_path)
    eights, many = (count_held_bytes("medusa", processes, tmp_path, split) for processes in (8, 64))
    heads = 64 * many[SPLIT_HEADS]
    assert heads == pytest.approx(8 * eights[SPLIT_HEADS], rel=1e-3)
    assert heads == pytest.approx(gathering[GATHERED] - eights[GATHERED], rel=1e-3)
    assert heads == pytest.approx(64 / 7 * (eights[GRADIENTS] - many[GRADIENTS]), rel=1e-3)


def count_held_bytes(kind: str, processes: int, target: Path, *words: str) -> Counter[str]:
    conf, layout = build_sharded_run(kind, processes, target, *words)
    return persistent_memory(conf, *build_models(conf, CPU.dtype), layout)


def build_sharded_run(kind: str, processes: int, target: Path, *words: str) -> tuple[TrainConf, ProcessLayout]:
    rows = f"optim.rows_per_step={processes}"
    conf = build_conf(*KINDS[kind], "parallel=sharded", f"target.path={target}", rows, *words)
    return conf, build_layout(conf, replace(GENEROUS, chips=1, cores=processes), 4, 1)
