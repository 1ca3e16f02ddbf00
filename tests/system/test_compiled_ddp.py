"""Two processes with a compiled loss, as every run on several GPUs has it, learn as eager ones."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.runs import launch_script
from tests.support.runs.layout_run import build_layout_target
from tests.support.runs.toy_run import metrics, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    target = build_layout_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    launch_script("compiled_ddp_run.py", folder, processes=2)
    return folder


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("eagle3, compiled", "eagle3"),
        ("eagle3, small buckets", "eagle3"),
        ("eagle3, split target", "eagle3"),
        ("eagle3, split heads", "eagle3"),
        ("medusa, split heads", "medusa"),
        ("draft model, compiled", "draft model"),
    ],
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
    files = sorted(folder.glob("parts-*.json"))
    assert len(files) == 2
    for file in files:
        parts = json.loads(file.read_text())
        for draft in ("eagle3", "draft model"):
            assert (parts[f"{draft}, eager"], parts[f"{draft}, compiled"]) == (0, 3)
        for run in ("eagle3, split target", "eagle3, split heads", "medusa, split heads"):
            assert parts[run] == 3  # the target, the draft, a chunk of the loss
        assert parts["eagle3, small buckets"] > 6
