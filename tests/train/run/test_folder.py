"""A run's folder is claimed or refused, started over, and continued to another length."""

import json
import logging
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from data.config import DataConf, OnPolicyConf
from data.packing.sampler import RowOrder
from models.checkpoints.saved_states import find_newest_state
from models.drafts.base import Draft
from models.io.errors import UserError
from models.io.lock import release_lock
from tests.support.models.methods import CASES
from tests.support.models.tiny import CPU
from tests.support.runs.toy_run import ROWS, metrics, toy_conf, toy_rows, toy_run
from train.config.optim import Schedule
from train.config.run import ParallelConf, TrainConf
from train.distributed.build import build_parallel
from train.run.folder import (
    check_disk_space,
    check_steps,
    disk_bytes_needed,
    open_run,
    replace_outdated_files,
    report_full_disk,
    reset_run_dir,
    start_over,
)
from train.run.state import RunState, flatten_config

WSD = {"schedule": Schedule.wsd, "decay_ratio": 0.25}  # of 12 steps the last 3, of 20 the last 5
CONSTANT = {"schedule": Schedule.constant}


def build_conf(steps: int | None, **optim) -> TrainConf:
    return toy_conf(optim={"steps": steps, **optim})


def interrupt_run(folder: Path, conf: TrainConf, *, at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        toy_run(folder, conf, interrupt_at=at)


def test_a_finished_run_with_a_constant_rate_goes_on_with_more_steps(tmp_path):
    toy_run(tmp_path, build_conf(12, **CONSTANT))
    toy_run(tmp_path, build_conf(20, **CONSTANT))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["00000020"]
    assert [line["step"] for line in metrics(tmp_path)][-2:] == [18, 20]
    assert {line["train/lr"] for line in metrics(tmp_path)[1:]} == {3e-3}


def test_a_run_goes_on_with_more_steps_before_its_decay(tmp_path):
    interrupt_run(tmp_path, build_conf(12, **WSD), at=7)
    toy_run(tmp_path, build_conf(20, **WSD))
    rates = {line["step"]: line["train/lr"] for line in metrics(tmp_path)}
    assert rates[6] == rates[14] == 3e-3 > rates[16] > rates[20]


def test_a_longer_run_rewrites_its_rows_where_it_goes_on(tmp_path):
    """Its last step is not a step at which rows are rewritten."""
    data = DataConf(seed=1, on_policy=OnPolicyConf(share=0.5, interval=5))
    for steps in (12, 20):
        conf = toy_conf(optim={"steps": steps, **CONSTANT}, data=data, interval={"save": None})
        _, progress = toy_run(tmp_path, conf)
        assert progress.step == steps


@pytest.mark.parametrize(
    ("started", "now", "stop", "line"),
    [
        ({"steps": 12}, {"steps": 20}, 7, r"steps: .* \(12 steps\) once 6 steps .* got 20 steps"),
        ({"epochs": 2.0}, {"epochs": 3.0}, 7, r"epochs: .* \(12 steps\) .* got 18 steps"),
        ({"steps": 12} | CONSTANT, {"steps": 4} | CONSTANT, 7, r"steps: .* got 4 steps"),
        ({"steps": 12} | WSD, {"steps": 20} | WSD, 11, r"steps: .* once 10 steps .* got 20 steps"),
    ],
    ids=["cosine", "cosine by epochs", "fewer than taken", "in the decay"],
)
def test_other_changes_of_length_are_refused_before_a_model_is_loaded(tmp_path, started, now, stop, line):
    interrupt_run(tmp_path, build_conf(**{"steps": None} | started), at=stop)
    changed = build_conf(**{"steps": None} | now)
    state = RunState(tmp_path, flatten_config(changed))
    state.load_progress()
    with pytest.raises(UserError, match=rf"^optim\.{line}; use another run_name$"):
        check_steps(state, changed.optim)


def test_epochs_become_steps_and_can_be_raised(tmp_path, caplog):
    """With 24 rows and 4 a step, 1.5 epochs are 9 steps and 3 epochs are 18."""
    caplog.set_level(logging.INFO)
    for epochs, steps in ((1.5, 9), (1.5, 9), (3.0, 18)):
        _, progress = toy_run(tmp_path, build_conf(None, epochs=epochs, **CONSTANT))
        assert (progress.step, progress.steps) == (steps, steps)
    assert "9 steps x 4 rows = 36 rows (1.5 epochs of 24)" in caplog.text


def test_rows_and_tokens_seen_are_counted_on_after_a_kill(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyboardInterrupt):
        toy_run(tmp_path, toy_conf(), interrupt_at=7)
    toy_run(tmp_path, toy_conf())
    rows = toy_rows()
    order = RowOrder(seed=1, num_rows=ROWS, rows_per_step=4)
    tokens, answers = 0, 0
    lines = {int(line["step"]): line for line in metrics(tmp_path)}
    for step in range(12):
        batch = rows.batch(order.step_rows(step))
        tokens += int((batch.document_ids >= 0).sum())
        answers += int((batch.answer_mask & (batch.document_ids >= 0)).sum())
        if line := lines.get(step + 1):
            assert (line["train/rows"], line["train/epochs"]) == (4 * (step + 1), (step + 1) / 6)
            assert (line["train/tokens"], line["train/answer_tokens"]) == (tokens, answers)
    assert list(lines) == [2, 3, 4, 6, 8, 9, 10, 12]
    assert "step 12/12  rows 48  epochs 2  tokens 576  loss" in caplog.text


def test_too_little_room_is_refused(tmp_path):
    huge = Draft()
    with torch.device("meta"):
        huge.layer = torch.nn.Linear(10**8, 10**8)
    with pytest.raises(UserError, match=r"output_dir: needs 3[0-9]{8}.* GB of free disk space"):
        check_disk_space(tmp_path, huge)


def test_a_run_that_is_started_over_keeps_the_earlier_one_until_it_saves_a_state(tmp_path):
    toy_run(tmp_path, build_conf(12))
    (tmp_path / "toy-tuned.json").touch()
    names = {path.name for path in tmp_path.iterdir()}
    again = replace(build_conf(12), output_dir=str(tmp_path.parent), run_name=tmp_path.name, resume=False)
    open_run(again, build_parallel(ParallelConf(), CPU, trackers=[]))
    release_lock(tmp_path)
    assert find_newest_state(tmp_path) is None
    assert {path.name for path in (tmp_path / "replaced").iterdir()} == names - {"lock"}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "toy-tuned.json").touch()
    reset_run_dir(tmp_path)  # what was stopped before its first state replaces none
    assert (tmp_path / "replaced" / "state").exists()
    assert not (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "toy-tuned.json").exists()
    toy_run(tmp_path, build_conf(12))
    assert not (tmp_path / "replaced").exists()


def test_a_run_that_goes_on_drops_the_card_of_the_weights_that_it_may_replace(tmp_path):
    def open_with(steps: int) -> None:
        conf = replace(build_conf(steps, **CONSTANT), output_dir=str(tmp_path.parent), run_name=tmp_path.name)
        run = open_run(conf, build_parallel(ParallelConf(), CPU, trackers=[]))
        replace_outdated_files(run, conf)
        release_lock(tmp_path)

    toy_run(tmp_path, build_conf(12, **CONSTANT))
    progress = find_newest_state(tmp_path) / "progress.json"
    saved = json.loads(progress.read_text())
    named = {"run_name": tmp_path.name, "output_dir": str(tmp_path.parent), "device.route": "cpu"}
    progress.write_text(json.dumps(saved | {"config": saved["config"] | named}))
    (tmp_path / "checkpoint" / "README.md").touch()
    open_with(12)
    assert (tmp_path / "checkpoint" / "README.md").exists()
    open_with(20)
    assert not (tmp_path / "checkpoint" / "README.md").exists()


@pytest.mark.parametrize(
    ("first", "second", "goes_on"),
    [
        ({}, {}, False),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, True),  # by the same launcher
        (
            {"TORCHELASTIC_RUN_ID": "7-0", "DRAFTSMITH_LAUNCH": "job 7"},
            {"TORCHELASTIC_RUN_ID": "7-1", "DRAFTSMITH_LAUNCH": "job 7"},
            True,
        ),
    ],
    ids=["no launcher", "restart", "early restart of another launch", "one launcher", "requeued job"],
)
def test_a_launch_starts_a_run_over_once_however_often_it_is_restarted(tmp_path, monkeypatch, first, second, goes_on):
    for variables in (first, second):
        with monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            start_over(tmp_path)
        (tmp_path / "state" / "00000004").mkdir(parents=True, exist_ok=True)
        (tmp_path / "metrics.jsonl").touch()
        replaced = (tmp_path / "replaced").exists()
    assert replaced is not goes_on


def test_a_run_that_a_kill_left_half_aside_replaces_the_one_before_it(tmp_path):
    """Its states go aside first: a rename ends before the rest follows."""
    for name in ("replaced/state/00000002", "replaced.partial/state/00000004", "checkpoint"):
        (tmp_path / name).mkdir(parents=True)
    reset_run_dir(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {
        *("replaced", "replaced/state", "replaced/state/00000004", "replaced/checkpoint")
    }


def test_a_checkpoint_moved_aside_stays_though_a_stopped_run_has_written_another(tmp_path):
    for name in ("replaced.partial/checkpoint/first", "checkpoint/second"):
        (tmp_path / name).mkdir(parents=True)
    reset_run_dir(tmp_path)
    assert [path.name for path in (tmp_path / "replaced" / "checkpoint").iterdir()] == ["first"]
    assert not (tmp_path / "checkpoint").exists()


def test_a_continued_run_needs_no_room_for_the_files_that_it_has(tmp_path, monkeypatch):
    draft = Draft()
    draft.layer = torch.nn.Linear(100, 100)
    needed = disk_bytes_needed(draft)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed // 2))
    with pytest.raises(UserError, match=r"^output_dir: needs"):
        check_disk_space(tmp_path, draft)
    for name, share in (("state/00000001/weights", needed // 4), ("checkpoint/model.safetensors", needed // 4 + 1)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(share))
    check_disk_space(tmp_path, draft)


@pytest.mark.parametrize("name", ["medusa", "medusa2"])
def test_an_adapted_target_needs_room_for_its_old_and_its_new_files(name, target, tmp_path):
    draft = CASES[name].build(target)
    draft.save(tmp_path, target)
    adapted = [load_file(file) for file in tmp_path.glob("target-*/*.safetensors")]
    assert len(adapted) == (name == "medusa2")
    held = sum(tensor.nbytes for tensors in adapted for tensor in tensors.values())
    assert disk_bytes_needed(draft, target) - disk_bytes_needed(draft) == 2 * held


@pytest.mark.parametrize("room", [0, 1500, 3000, 5000])
def test_a_disk_that_fills_up_is_a_single_line_and_the_last_state_stays(tmp_path, monkeypatch, room):
    """A limit on the size of files makes writes fail as a full disk does."""
    measured = []

    def shrink(draft):
        measured.append(draft)
        if len(measured) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        return {"delivered_per_round": 1.0}

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr("tests.support.runs.toy_run.toy_length", shrink)
    try:
        with pytest.raises(UserError, match="output_dir: the disk is full, got"):
            toy_run(tmp_path, toy_conf())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["00000006"]


def test_an_interrupt_while_a_state_is_saved_is_an_interrupt(tmp_path):
    """PyTorch wraps it in an error of its own, of which the command would print a page."""
    failures: Any = {0: (KeyboardInterrupt(), None)}
    with pytest.raises(KeyboardInterrupt), report_full_disk(tmp_path):
        raise CheckpointException("interrupted", failures)


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(RuntimeError, match="shape"), report_full_disk(tmp_path):
        raise RuntimeError("shape mismatch")
