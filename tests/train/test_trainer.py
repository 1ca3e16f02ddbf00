"""Promises of the training loop, with a toy draft: it must not matter how a batch is split."""

import socket
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
import torch

from data.config import DataConf
from models.device.config import DeviceConf, DeviceName, Precision
from models.drafts.registry import build_draft
from models.io.errors import UserError
from models.targets.target import Target
from tests.support.runs.killing import TIMEOUT_S, toy_process
from tests.support.runs.toy_run import ROWS, ToyDraft, metrics, toy_conf, toy_run, toy_target, weights
from train.config.optim import OptimName
from train.run.state import RunState

UNCLIPPED = {"max_grad_norm": 1e3}  # a clipped gradient has one size, however it was scaled


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=0, msg=name)


def test_accumulation_changes_nothing(tmp_path):
    for folder, micro_batch_size in (("whole", 4), ("split", 2)):
        optim = {"rows_per_step": 4, "micro_batch_size": micro_batch_size, **UNCLIPPED}
        toy_run(tmp_path / folder, toy_conf(dropout=0.0, optim=optim))
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "split"))


def test_keeping_features_changes_nothing_and_asks_the_target_once(tmp_path, monkeypatch):
    looks, see = [], Target.forward_hidden
    monkeypatch.setattr(Target, "forward_hidden", lambda *a, **kw: looks.append(1) or see(*a, **kw))
    for keep, passes in ((False, 12), (True, ROWS // 4)):  # 12 steps; one pass over the rows
        looks.clear()
        data = DataConf(seed=1, keep_features=keep)
        toy_run(tmp_path / str(keep), toy_conf(dropout=0.0, data=data))
        assert len(looks) == passes
    assert_close(weights(tmp_path / "False"), weights(tmp_path / "True"))


def test_features_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(UserError, match=r"^data.keep_features: must fit in half of the free"):
        toy_run(tmp_path, toy_conf(data=DataConf(keep_features=True)))


def two_processes(*folders: Path, changes: dict) -> list[Popen]:
    """Start both ranks of a run, the first in the first folder and the second in the last."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    return [
        toy_process(
            folder,
            changes,
            stderr=PIPE,
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE="2",
            MASTER_ADDR="localhost",
            MASTER_PORT=port,
        )
        for rank, folder in zip("01", (folders[0], folders[-1]), strict=True)
    ]


@pytest.mark.system
def test_processes_that_see_other_states_are_refused(tmp_path):
    """As where a network file system shows a node what was there a while ago."""
    toy_run(tmp_path / "done", toy_conf())
    ranks = two_processes(tmp_path / "done", tmp_path / "none", changes={})
    for rank, step in zip(ranks, (12, 0), strict=True):
        _, said = rank.communicate(timeout=TIMEOUT_S)
        assert f"must show every process the same states, got step {step} here" in said


@pytest.mark.system
def test_processes_change_nothing(tmp_path):
    changes = {"dropout": 0.0, "optim": {"rows_per_step": 4, "micro_batch_size": 1, **UNCLIPPED}}
    ranks = two_processes(tmp_path / "two", changes=changes)
    assert [rank.communicate(timeout=TIMEOUT_S) and rank.returncode for rank in ranks] == [0, 0]
    toy_run(tmp_path / "one", toy_conf(dropout=0.0, optim=UNCLIPPED))
    assert_close(weights(tmp_path / "one"), weights(tmp_path / "two"))
    counts = ("step", "train/rows", "train/epochs", "train/tokens", "train/answer_tokens")
    one, two = ([[m[k] for k in counts] for m in metrics(tmp_path / name)] for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("precision", [Precision.float32, Precision.bfloat16])
@pytest.mark.parametrize("name", OptimName)
def test_what_should_move_moves_and_the_rest_does_not(tmp_path, precision, name):
    """Norms and biases too: in bf16 weights their updates would be rounded away."""
    target = toy_target()
    target.model.to(torch.bfloat16 if precision is Precision.bfloat16 else torch.float32)
    frozen = [p.clone() for p in target.model.parameters()]
    device = DeviceConf(name=DeviceName.cpu, precision=precision, compile=False)
    conf = replace(toy_conf(optim={"lr": 1e-3}), device=device)
    conf.optim.name = name
    before = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed).state_dict()
    draft, _ = toy_run(tmp_path, conf, target=target)
    for key, after in draft.state_dict().items():
        assert after.dtype is torch.float32
        moved = (after != before[key]).float().mean()
        assert moved == 0 if key.startswith("frozen") else moved > 0.5, key
    assert all(map(torch.equal, frozen, target.model.parameters()))


def test_the_loss_falls(tmp_path):
    toy_run(tmp_path, toy_conf(optim={"steps": 60, "lr": 2e-2}))
    lines = metrics(tmp_path)
    assert lines[-1]["train/loss"] < 0.5 * lines[0]["train/loss"]
    assert lines[-1]["train/hit"] > lines[0]["train/hit"]


def test_the_best_checkpoint_is_chosen_by_delivered_tokens(tmp_path, monkeypatch):
    """Not by the loss or by tau, and not the last."""
    lengths = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(
        "tests.support.runs.toy_run.toy_length",
        lambda draft: {"delivered_per_round": (length := next(lengths)), "acceptance_length": 9 - length},
    )
    _, progress = toy_run(tmp_path, toy_conf())
    assert (progress.best, progress.best_step) == (2.5, 8)
    logged = [line.get("eval/delivered_per_round") for line in metrics(tmp_path)]
    assert [length for length in logged if length] == [1.5, 2.5, 2.0]


def test_measuring_leaves_training_alone(tmp_path, monkeypatch):
    toy_run(tmp_path / "drawing", toy_conf())
    monkeypatch.setattr("tests.support.runs.toy_run.toy_length", lambda draft: {"delivered_per_round": 1.0})
    toy_run(tmp_path / "quiet", toy_conf())
    one, two = weights(tmp_path / "drawing"), weights(tmp_path / "quiet")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_loss_that_is_not_finite_ends_the_run_not_its_state(tmp_path, monkeypatch):
    """Step 7 is read together with step 8, before a state of step 8 is saved."""
    called = []

    def spoiled(self, batch, seen, loss=ToyDraft.loss, **extras):
        called.append(batch)
        found = loss(self, batch, seen, **extras)
        found.total = found.total * (torch.nan if len(called) == 7 else 1)
        return found

    monkeypatch.setattr(ToyDraft, "loss", spoiled)
    with pytest.raises(UserError, match=r"optim\.lr: the loss must stay finite, got nan at step 7"):
        toy_run(tmp_path, toy_conf())
    assert RunState(tmp_path, {}).newest_state().name == "00000006"
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())
