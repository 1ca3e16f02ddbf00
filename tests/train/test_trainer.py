"""The training loop learns the same weights however a batch is split; tested with a toy draft."""

import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
import torch

from data.config import DataConf
from models.checkpoints.saved_states import find_newest_state
from models.device.config import DeviceConf, DeviceName, Precision
from models.drafts.registry import build_draft
from models.io.errors import UserError
from models.targets.target import Target
from tests.support.commands.ports import find_free_port
from tests.support.data.packed import packed_of
from tests.support.runs.killing import TIMEOUT_S, start_toy_process
from tests.support.runs.toy_run import (
    ROWS,
    ToyDraft,
    load_saved_tensors,
    metrics,
    toy_conf,
    toy_rows,
    toy_run,
    toy_target,
    weights,
)
from train.config.optim import OptimName

UNCLIPPED = {"max_grad_norm": 1e3}  # a clipped gradient has the same norm at every scale


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=0, msg=name)


def test_accumulation_changes_no_weight(tmp_path):
    for folder, micro_batch_size in (("full", 4), ("split", 2)):
        optim = {"rows_per_step": 4, "micro_batch_size": micro_batch_size, **UNCLIPPED}
        toy_run(tmp_path / folder, toy_conf(dropout=0.0, optim=optim))
    assert_close(weights(tmp_path / "full"), weights(tmp_path / "split"))


def test_features_in_memory_change_no_weight_and_are_computed_once(tmp_path, monkeypatch):
    calls, forward_hidden = [], Target.forward_hidden
    monkeypatch.setattr(Target, "forward_hidden", lambda *a, **kw: calls.append(1) or forward_hidden(*a, **kw))
    for keep, passes in ((False, 12), (True, ROWS // 4)):  # 12 steps; a single pass over the rows
        calls.clear()
        data = DataConf(seed=1, keep_features=keep)
        toy_run(tmp_path / str(keep), toy_conf(dropout=0.0, data=data))
        assert len(calls) == passes
    assert_close(weights(tmp_path / "False"), weights(tmp_path / "True"))


def test_features_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(UserError, match=r"^data.keep_features: must fit in half of the free"):
        toy_run(tmp_path, toy_conf(data=DataConf(keep_features=True)))


def test_features_of_all_processes_of_a_machine_must_fit(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    toy_run(tmp_path / "a", toy_conf(data=DataConf(keep_features=True)))
    kept = next(float(line.split()[1]) for line in caplog.messages if line.startswith("features: "))
    assert kept < 0.01  # GB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**6))
    with pytest.raises(UserError, match=r"^data.keep_features: must fit in half of the free"):
        toy_run(tmp_path / "b", toy_conf(data=DataConf(keep_features=True)))


def start_two_ranks(*folders: Path, changes: dict) -> list[Popen]:
    """Start both ranks of a run, the first in the first folder and the second in the last."""
    port = str(find_free_port())
    return [
        start_toy_process(
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


@pytest.mark.slow
@pytest.mark.system
def test_processes_that_see_other_states_are_refused(tmp_path):
    """A network file system may show a node the files of a while ago."""
    toy_run(tmp_path / "finished", toy_conf())
    ranks = start_two_ranks(tmp_path / "finished", tmp_path / "none", changes={})
    for rank, step in zip(ranks, (12, 0), strict=True):
        _, errors = rank.communicate(timeout=TIMEOUT_S)
        assert f"must show every process the same states, got step {step} here" in errors


@pytest.mark.system
def test_the_number_of_processes_changes_no_weight(tmp_path):
    changes = {"dropout": 0.0, "optim": {"rows_per_step": 4, "micro_batch_size": 1, **UNCLIPPED}}
    ranks = start_two_ranks(tmp_path / "two", changes=changes)
    assert [rank.communicate(timeout=TIMEOUT_S) and rank.returncode for rank in ranks] == [0, 0]
    toy_run(tmp_path / "single", toy_conf(dropout=0.0, optim=UNCLIPPED))
    assert_close(weights(tmp_path / "single"), weights(tmp_path / "two"))
    counts = ("step", "train/rows", "train/epochs", "train/tokens", "train/answer_tokens")
    single, two = ([[m[k] for k in counts] for m in metrics(tmp_path / name)] for name in ("single", "two"))
    assert single == two


@pytest.mark.parametrize("precision", [Precision.float32, Precision.bfloat16])
@pytest.mark.parametrize("name", OptimName)
def test_trained_weights_move_and_frozen_weights_do_not(tmp_path, precision, name):
    """Norms and biases move too; in bf16 weights, their updates would be rounded away."""
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


def test_a_row_draws_other_numbers_at_each_visit(tmp_path, monkeypatch):
    drawn = defaultdict(list)

    def observed(self, batch, seen, mask, loss_terms=ToyDraft.loss_terms):
        for row, numbers in zip(batch.input_ids.tolist(), mask, strict=True):
            drawn[tuple(row)].append(numbers)
        return loss_terms(self, batch, seen, mask)

    monkeypatch.setattr(ToyDraft, "loss_terms", observed)
    toy_run(tmp_path, toy_conf(dropout=0.5))
    assert [len(visits) for visits in drawn.values()] == [2] * ROWS
    assert not any(torch.equal(*visits) for visits in drawn.values())


def test_a_gradient_is_clipped_to_the_configured_norm(tmp_path):
    optim = {"steps": 1, "max_grad_norm": 1e-3, "betas": [0.9, 0.99]}
    toy_run(tmp_path, toy_conf(optim=optim))
    assert metrics(tmp_path)[0]["train/grad_norm"] > 0.1
    moments = load_saved_tensors(tmp_path / "state" / "00000001", "moments")
    means, squares = (
        torch.cat([tensor.flatten() for name, tensor in moments.items() if name.endswith(kind)])
        for kind in ("exp_avg", "exp_avg_sq")
    )
    assert float(means.norm()) == pytest.approx((1 - 0.9) * 1e-3, rel=1e-3)
    assert float(squares.sum()) == pytest.approx((1 - 0.99) * 1e-6, rel=1e-3)


def test_a_step_without_an_answer_moves_no_weight(tmp_path, monkeypatch):
    batch = toy_rows().batch([*range(ROWS)])
    rows = packed_of(replace(batch, answer_mask=torch.zeros_like(batch.answer_mask)))
    monkeypatch.setattr("tests.support.runs.toy_run.toy_rows", lambda: rows)
    conf = toy_conf(optim={"steps": 1, "weight_decay": 0.0})
    before = build_draft(conf.draft, toy_target(), loss=conf.loss, seed=conf.seed).state_dict()
    toy_run(tmp_path, conf)
    after = weights(tmp_path)
    assert all(torch.equal(after[name], before[name.removeprefix("draft.")]) for name in after)


def test_the_loss_falls(tmp_path):
    toy_run(tmp_path, toy_conf(optim={"steps": 60, "lr": 2e-2}))
    lines = metrics(tmp_path)
    assert lines[-1]["train/loss"] < 0.5 * lines[0]["train/loss"]
    assert lines[-1]["train/hit"] > lines[0]["train/hit"]


def test_the_best_checkpoint_is_chosen_by_delivered_tokens(tmp_path, monkeypatch):
    """It is chosen neither by the loss nor by tau, and need not be the last."""
    lengths = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(
        "tests.support.runs.toy_run.toy_length",
        lambda draft: {"delivered_per_round": (length := next(lengths)), "acceptance_length": 9 - length},
    )
    _, progress = toy_run(tmp_path, toy_conf())
    assert (progress.best, progress.best_step) == (2.5, 8)
    logged = [line.get("eval/delivered_per_round") for line in metrics(tmp_path)]
    assert [length for length in logged if length] == [1.5, 2.5, 2.0]


def test_an_evaluation_changes_no_trained_weight(tmp_path, monkeypatch):
    toy_run(tmp_path / "drawing", toy_conf())
    monkeypatch.setattr("tests.support.runs.toy_run.toy_length", lambda draft: {"delivered_per_round": 1.0})
    toy_run(tmp_path / "quiet", toy_conf())
    drawing, quiet = weights(tmp_path / "drawing"), weights(tmp_path / "quiet")
    assert all(torch.equal(drawing[name], quiet[name]) for name in drawing)


@pytest.mark.parametrize(("spoiled", "expected"), [("loss", "loss"), ("gradient", "norm of the gradients")])
def test_what_is_not_finite_ends_the_run_and_spoils_no_state(tmp_path, monkeypatch, spoiled, expected):
    """Step 10 is neither logged nor evaluated, and is read before its state is saved."""
    called = []

    def spoil(self, batch, seen, loss_terms=ToyDraft.loss_terms, **extras):
        called.append(batch)
        result = loss_terms(self, batch, seen, **extras)
        if len(called) == 10 and spoiled == "loss":
            result.total = result.total * torch.nan
        elif len(called) == 10:
            result.total.register_hook(lambda gradient: gradient * torch.nan)
        return result

    monkeypatch.setattr(ToyDraft, "loss_terms", spoil)
    with pytest.raises(UserError, match=rf"optim\.lr: the {expected} must stay finite, got nan at step 10"):
        toy_run(tmp_path, toy_conf())
    assert find_newest_state(tmp_path).name == "00000008"
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())
