"""Compiled decoding has one graph a function and shape, none added after the warm-up, and one read a round."""

import json
from pathlib import Path

import pytest

from models.device.opening import can_compile
from tests.support.models.methods import CASES
from tests.support.runs import run_module, run_python
from tests.support.runs.compiled_run import REQUESTS, SHAPES

ROOT = Path(__file__).parents[2]


def run_compiled(backend: str, count: int, *names: str) -> dict:
    return run_module("compiled_run", backend, str(count), *names)


def assert_promises(figures: dict):
    """Check the promises of every mode; an untrained and a trained draft share their graphs."""
    assert figures["breaks"] == {}
    for name, mode in figures["modes"].items():
        assert mode["graphs"] > 0, name
        assert mode["added"] == 0, name
        assert mode["reads"] == mode["rounds_and_first_tokens"], name
        assert mode["equal"], name  # tokens and accepted counts, to those of the eager runtime
        assert (mode["accepted"] > 0) == (name != "none"), name


def test_no_graph_is_added_after_warm_up():
    """The graphs do not depend on the backend, and the backend that lowers nothing is quick."""
    figures = run_compiled("eager", 17, "none", "mixed", "typical")
    assert_promises(figures)
    assert figures["keeps_apart"]  # two targets, though their weights are not checked at each call
    # Prefill and round; for a draft also its start: graphs that do not depend on the tree are shared;
    # typical: the prompt's pass too, because it samples
    total = {"none": 2, "mixed": 4, "typical": 7}
    assert {name: mode["graphs"] for name, mode in figures["modes"].items()} == total


@pytest.mark.slow
def test_no_graph_is_added_by_two_hundred_mixed_requests():
    """They go through four slots, in two prompt buckets; slots are refilled as rows end."""
    mixed = run_compiled("eager", 4, REQUESTS)["mixed"]
    assert mixed["buckets"] == [64, 128]
    assert mixed["graphs"] > 0
    assert mixed["added"] == 0
    assert mixed["equal"]
    assert mixed["accepted"] > 0
    assert mixed["early"] > 10  # ended by an EOS or a stop string


@pytest.mark.slow
def test_no_case_of_a_method_adds_a_graph_after_warm_up():
    """Its loss is one graph too: `run` fails at a graph break."""
    figures = run_compiled("eager", 4, *CASES)
    assert_promises(figures)
    assert all(mode["loss_apart"] < 1e-4 for mode in figures["modes"].values())


@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
def test_a_mixed_tree_compiled_by_inductor_emits_the_tokens_of_eager_decoding():
    """The demo's figures are measured so: EAGLE-3, with each graph lowered to machine code."""
    assert_promises(run_compiled("inductor", 2, "mixed"))


@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
@pytest.mark.slow
def test_a_compile_cache_on_disk_is_keyed_by_the_width_of_vectors(tmp_path):
    """One CPU is limited to three widths in turn, and none gets the code of another."""
    script = """
import torch
from tests.support.models.tiny import CPU
from dataclasses import replace
compiled = replace(CPU, compiles=True).compile(lambda x: (x[1:] + x[:-1]).cumsum(0).softmax(-1))
print(compiled(torch.arange(60.0).view(4, 15) / 7).flatten().tolist())
"""

    def run_script(capability: str) -> str:
        changed = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        return run_python("-W", "ignore", "-c", script, **changed)

    widest = json.loads(run_script("avx512"))  # without AVX-512, the machine's own width
    for capability in ("avx2", "default"):
        assert json.loads(run_script(capability)) == pytest.approx(widest, abs=1e-5)


@pytest.mark.skipif(not can_compile("cpu"), reason="no C++ compiler: all runs eagerly here")
@pytest.mark.slow
def test_every_compiled_shape_of_tree_emits_the_tokens_of_eager_decoding():
    assert_promises(run_compiled("inductor", 20, *SHAPES))
