"""Several processes learn what a single process learns, hold only their part, and save for any number."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from models.drafts.options import Medusa2Conf
from models.io.errors import UserError
from models.targets.config import TargetConf
from tests.support.runs import launch_script
from tests.support.runs.parallel_run import run, save_target
from tests.support.runs.toy_run import metrics, toy_conf
from train.config.run import ParallelConf, Weights
from train.distributed.build import check_parallel

ROOT = Path(__file__).parents[2]
SPLIT = {"tensor": 2}
DRAFT_SHARDED = {"draft": "sharded"}
ALL_SHARDED = {"target": "sharded", "draft": "sharded"}
SPLIT_HEADS = DRAFT_SHARDED | {"split_heads": True}
LAYOUTS = {
    "tensor": SPLIT,
    "sharded": ALL_SHARDED,
    "tensor and sharded": SPLIT | ALL_SHARDED,
    "tensor and split heads": SPLIT | SPLIT_HEADS,
    "sharded and split heads": ALL_SHARDED | SPLIT_HEADS,
}
OTHERS = {"eagle1": DRAFT_SHARDED, "medusa": SPLIT_HEADS, "hydra": SPLIT_HEADS, "pruned": DRAFT_SHARDED}
STOPPED = ("tensor", "tensor and split heads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run four processes and a single one; a `state` stops at step 2, and `resumed` goes on from there."""
    folder = tmp_path_factory.mktemp("parallel")
    save_target(folder / "target")
    runs = [{"folder": str(folder / name), "parallel": way} for name, way in LAYOUTS.items()]
    for name in STOPPED:
        state = {"folder": str(folder / f"state, {name}"), "parallel": LAYOUTS[name], "stop": 2}
        runs += [state, state | {"folder": str(folder / f"resumed, {name}"), "after": state["folder"], "stop": 4}]
    launch_script("parallel_run.py", folder / "target", json.dumps(runs), processes=4)
    run(folder / "target", folder=str(folder / "single"), parallel={})
    return folder


def read_losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(folder)]


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_four_processes_learn_and_decode_as_a_single_one(folder, name):
    assert read_losses(folder / name) == pytest.approx(read_losses(folder / "single"), rel=1e-5)
    (alone,) = read_ranks(folder / "single")
    together = read_ranks(folder / name)
    assert len(together) == 4
    for rank in together:
        assert rank["fingerprint"] == alone["fingerprint"]
        assert rank["logits"] == pytest.approx(alone["logits"], abs=1e-5)
        assert rank["progress"] == alone["progress"]  # the acceptance length among it


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_processes_end_with_the_same_draft_bit_for_bit(folder, name):
    assert len({rank["draft"] for rank in read_ranks(folder / name)}) == 1


def test_every_process_gets_the_values_that_only_one_process_computes(folder):
    assert all(rank["heard"] for rank in read_ranks(folder / "tensor"))
    assert not read_ranks(folder / "single")[0]["heard"]
    for name in ("tensor", "single"):
        assert {rank["main"] for rank in read_ranks(folder / name)} == {0}
        assert {rank["refused"] for rank in read_ranks(folder / name)} == {"refused by process 0"}


def test_no_process_holds_more_than_its_part(folder):
    (alone,) = read_ranks(folder / "single")
    for rank in read_ranks(folder / "sharded"):
        assert rank["draft_held"] <= 0.26 * alone["draft_held"]
        assert rank["target_held"] <= 0.3 * alone["target_held"]  # norms are cut unevenly
    for rank in read_ranks(folder / "tensor"):
        assert rank["draft_held"] == alone["draft_held"]
        assert rank["target_held"] <= 0.51 * alone["target_held"]


@pytest.mark.parametrize("name", STOPPED)
def test_a_resumed_run_of_four_processes_ends_as_an_unbroken_one_bit_for_bit(folder, name):
    assert read_ranks(folder / f"resumed, {name}")[0]["draft"] == read_ranks(folder / name)[0]["draft"]


@pytest.mark.parametrize("name", STOPPED)
def test_a_state_of_four_processes_is_resumed_by_a_single_one(folder, name):
    alone = folder / f"{name}, on a single one"
    run(folder / "target", folder=str(alone), parallel={}, after=str(folder / f"state, {name}"))
    assert read_losses(alone) == pytest.approx(read_losses(folder / "single"), rel=1e-5)


def test_a_state_of_four_processes_is_resumed_by_two(folder):
    after = str(folder / "state, tensor")
    runs = [
        {"folder": str(folder / "on two processes"), "parallel": DRAFT_SHARDED, "after": after},
        *(
            {"folder": str(folder / name), "parallel": SPLIT | way, "draft": name, "steps": 1}
            for name, way in OTHERS.items()
        ),
    ]
    launch_script("parallel_run.py", folder / "target", json.dumps(runs), processes=2)
    expected = read_losses(folder / "single")
    assert read_losses(folder / "state, tensor") == pytest.approx(expected[:2], rel=1e-5)
    assert read_losses(folder / "on two processes") == pytest.approx(expected, rel=1e-5)
    for name in OTHERS:  # every method reads a target that is split, and is sharded itself
        alone = f"{name} alone"
        run(folder / "target", folder=str(folder / alone), parallel={}, draft=name, steps=1)
        assert read_losses(folder / name) == pytest.approx(read_losses(folder / alone), rel=1e-5)


@pytest.mark.parametrize(
    ("processes", "conf", "rows", "adapts", "message"),
    [
        (4, {"tensor": 3}, 8, False, r"parallel\.tensor: must divide the 4 processes, got 3"),
        (1, {"tensor": 2}, 8, False, r"parallel\.tensor: must divide the 1 processes, got 2"),
        (4, {"tensor": 4}, 8, False, r"parallel\.tensor: must divide the target's 2 key-value he"),
        (4, {"tensor": 1}, 6, False, r"optim\.rows_per_step: .* multiple of the 4 data-parallel .*, got 6; "),
        (12, {}, 8, False, r"optim\.rows_per_step: .* multiple of the 3 data-parallel .*, got 8; "),
        (4, {}, 6, True, r"optim\.rows_per_step: .* multiple of the 4 data-parallel .*, got 6; "),
        (4, {"tensor": 2}, 8, True, r"parallel: must split no weights for a draft that adapts"),
        (4, {"draft": Weights.sharded}, 8, True, r"parallel: must split no weights for a draft that adapts"),
        (4, {"split_heads": True}, 8, False, r"parallel\.split_heads: must be false unless parallel\.draft=sharded"),
    ],
)
def test_impossible_layouts_are_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch, processes, conf, rows, adapts, message
):
    save_target(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    run = toy_conf(
        target=TargetConf(path=str(tmp_path)),
        draft=Medusa2Conf() if adapts else None,
        parallel=ParallelConf(**conf),
        optim={"rows_per_step": rows},
    )
    with pytest.raises(UserError, match=message):
        check_parallel(run)
    check_parallel(replace(run, parallel=ParallelConf(), optim=replace(run.optim, rows_per_step=12 * rows)))


def test_an_older_torch_is_refused_where_weights_are_cut(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.0"))
    check_parallel(toy_conf())
    for conf in ({"tensor": 1, "target": Weights.sharded}, {"draft": Weights.sharded}):
        with pytest.raises(UserError, match=r"^parallel: must be replicated below torch 2\.13, got torch "):
            check_parallel(toy_conf(parallel=ParallelConf(**conf)))
    for newer in ("2.13.0", "2.13.0a0+79aa17489c.nv26.6"):
        monkeypatch.setattr(torch, "__version__", TorchVersion(newer))
        check_parallel(toy_conf(parallel=ParallelConf(draft=Weights.sharded)))
