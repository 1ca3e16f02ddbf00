"""With compiling on: one graph a function and shape, none added later, one read a round."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.device.opening import can_compile
from tests.support.models.methods import CASES
from tests.support.runs.compiled_run import REQUESTS, SHAPES

ROOT = Path(__file__).parents[2]


def run(backend: str, count: int, *names: str) -> dict:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.runs.compiled_run", backend]
    command += [str(count), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def promises(found: dict):
    """Prompts of `count` different lengths; an untrained and a trained draft share their graphs."""
    assert found["breaks"] == {}
    for name, mode in found["modes"].items():
        assert mode["graphs"] > 0, name
        assert mode["added"] == 0, name
        assert mode["reads"] == mode["rounds_and_first_tokens"], name
        assert mode["equal"], name  # tokens and accepted counts, to those of the eager runtime
        assert (mode["accepted"] > 0) == (name != "none"), name


def test_no_graph_is_added_after_warm_up():
    """Which graphs there are does not depend on what they are lowered to; to nothing is quick."""
    found = run("eager", 20, "none", "chain", "mixed", "typical")
    promises(found)
    assert found["keeps_apart"]  # two targets, though their weights are not checked at each call
    # prefill, round; for a draft also its start: what does not depend on the tree is shared;
    # typical: the prompt's pass too, because it samples
    total = {"none": 2, "chain": 4, "mixed": 6, "typical": 9}
    assert {name: mode["graphs"] for name, mode in found["modes"].items()} == total


def test_no_method_adds_a_graph_after_warm_up():
    """And its loss is one graph, too: `run` fails at a graph break. One case of each class."""
    found = run("eager", 4, "eagle3", "eagle1", "medusa", "hydra++", "draft model")
    promises(found)
    assert all(mode["loss_apart"] < 1e-4 for mode in found["modes"].values())


def test_no_graph_is_added_by_two_hundred_mixed_requests():
    """Through four slots, of two prompt buckets, refilled as rows end; equal to the eager ones."""
    mixed = run("eager", 4, REQUESTS)["mixed"]
    assert mixed["buckets"] == [64, 128]
    assert mixed["graphs"] > 0
    assert mixed["added"] == 0
    assert mixed["equal"]
    assert mixed["accepted"] > 0
    assert mixed["early"] > 10  # ended by an EOS or a stop string


@pytest.mark.slow
def test_no_case_of_a_method_adds_a_graph_after_warm_up():
    found = run("eager", 4, *CASES)
    promises(found)
    assert all(mode["loss_apart"] < 1e-4 for mode in found["modes"].values())


@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
def test_a_mixed_tree_compiled_by_inductor_emits_what_the_eager_one_does():
    """What the demo's figures run on: EAGLE-3, each graph lowered to machine code."""
    promises(run("inductor", 2, "mixed"))


@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
@pytest.mark.slow
def test_a_cache_on_disk_knows_the_width_of_vectors(tmp_path):
    """One CPU is held to three widths here: none is given code of another."""
    script = """
import torch
from tests.support.models.tiny import CPU
from dataclasses import replace
compiled = replace(CPU, compiles=True).compile(lambda x: (x[1:] + x[:-1]).cumsum(0).softmax(-1))
print(compiled(torch.arange(60.0).view(4, 15) / 7).flatten().tolist())
"""

    def printed(capability: str) -> str:
        changed = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-W", "ignore", "-c", script]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | changed, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    widest = json.loads(printed("avx512"))  # where there is none, the machine's own
    for capability in ("avx2", "default"):
        assert json.loads(printed(capability)) == pytest.approx(widest, abs=1e-5)


@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
@pytest.mark.slow
def test_every_compiled_shape_emits_what_the_eager_one_does():
    promises(run("inductor", 20, *SHAPES))
