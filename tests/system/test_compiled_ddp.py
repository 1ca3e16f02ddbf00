"""Two processes with a compiled loss, as every run on several GPUs has it, learn as eager ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.runs.toy_run import metrics, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    command = [
        sys.executable,
        *"-m torch.distributed.run --standalone --nproc_per_node=2".split(),
        ROOT / "tests" / "support" / "runs" / "compiled_ddp_run.py",
        folder,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert process.returncode == 0, process.stderr[-8000:]
    return folder


@pytest.mark.parametrize(
    ("name", "draft"),
    [("eagle3, compiled", "eagle3"), ("eagle3, small buckets", "eagle3"), ("draft model, compiled", "draft model")],
)
def test_two_processes_learn_the_same_with_a_compiled_loss_as_with_an_eager_one(folder, name, draft):
    eager, compiled = metrics(folder / f"{draft}, eager"), metrics(folder / name)
    for figure in ("train/loss", "train/grad_norm"):
        assert [line[figure] for line in compiled] == pytest.approx([line[figure] for line in eager], rel=1e-5)
    assert all(line["train/graphs_unannounced"] == 0 for line in compiled)
    eager_weights, compiled_weights = weights(folder / f"{draft}, eager"), weights(folder / name)
    assert eager_weights.keys() == compiled_weights.keys()
    for key in eager_weights:
        torch.testing.assert_close(compiled_weights[key], eager_weights[key], atol=1e-5, rtol=0, msg=key)


def test_the_loss_is_compiled_and_cut_where_buckets_end(folder):
    """Otherwise the runs above would compare eager with eager, or one bucket with one bucket."""
    for file in sorted(folder.glob("parts-*.json")):
        parts = json.loads(file.read_text())
        for draft in ("eagle3", "draft model"):
            assert (parts[f"{draft}, eager"], parts[f"{draft}, compiled"]) == (0, 2)
        assert parts["eagle3, small buckets"] > 6
