"""Promises of runs whose number of steps changes, follows from epochs, or is reached by time."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from data.config import DataConf, OnPolicyConf
from data.packing.sampler import RowOrder
from models.errors import UserError
from tests.support.tiny import CPU
from tests.support.toy_run import (
    ROWS,
    load_saved_tensors,
    metrics,
    toy_conf,
    toy_rows,
    toy_run,
    weights,
)
from train import state as states
from train.config.optim import OptimConf, Schedule
from train.config.parallel import ParallelConf
from train.config.run import TrainConf
from train.distributed.parallel import build_parallel
from train.run import disk_bytes_needed, find_resume_state, known_steps, trained_parameters
from train.state import RunState, SaveSchedule, flatten_config

PARALLEL = build_parallel(ParallelConf(), CPU, trackers=[])
WSD = {"schedule": Schedule.wsd, "decay_ratio": 0.25}  # of 12 steps the last 3, of 20 the last 5
CONSTANT = {"schedule": Schedule.constant}
WARMUP_OF_20 = 0.05  # one step, as a tenth of 12


def conf(steps: int, schedule: dict, *, warmup: float = 0.1, **changes) -> TrainConf:
    return toy_conf(optim={"steps": steps, "warmup_ratio": warmup, **schedule}, **changes)


def kept_states(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").iterdir())


def assert_same_end(one: Path, two: Path):
    """Weights and moments, bit for bit."""
    for part in ("weights", "moments"):
        a, b = (
            load_saved_tensors(RunState(folder, {}).newest_state(), part) for folder in (one, two)
        )
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), part


@pytest.mark.parametrize(
    ("schedule", "before", "after"),
    [
        (CONSTANT, ["00000012"], ["00000020"]),
        (WSD, ["00000008", "00000012"], ["00000014", "00000020"]),
    ],
    ids=["constant", "wsd"],
)
def test_an_extended_run_ends_as_one_that_was_as_long_from_the_start(
    tmp_path, schedule, before, after
):
    """Also if it is interrupted before it has saved anything. Its warm-up stays one step long."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    toy_run(run, conf(12, schedule))
    assert kept_states(run) == before
    (run / "report.json").touch()
    last = int(before[0])
    with pytest.raises(KeyboardInterrupt):
        toy_run(run, conf(20, schedule), interrupt_at=last + 1)
    assert not (run / "report.json").exists()
    assert kept_states(run) == before[:1]
    _, progress = toy_run(run, conf(20, schedule))
    toy_run(whole, conf(20, schedule, warmup=WARMUP_OF_20))
    assert (progress.step, kept_states(run)) == (20, after)
    assert_same_end(run, whole)
    counted = ("step", "train/loss", "train/lr", "train/rows", "train/tokens")
    lines = [[{k: line[k] for k in counted} for line in metrics(place)] for place in (run, whole)]
    assert lines[0] == lines[1]


def test_a_run_that_stopped_in_its_decay_is_extended_from_before_it(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        toy_run(run, conf(12, WSD), interrupt_at=11)
    assert kept_states(run) == ["00000008", "00000010"]
    toy_run(run, conf(20, WSD))
    toy_run(whole, conf(20, WSD, warmup=WARMUP_OF_20))
    assert_same_end(run, whole)


def test_a_kill_while_replaced_states_are_removed_leaves_a_run_that_goes_on(tmp_path, monkeypatch):
    def killed(path, **_):
        if path.exists():
            (path / states.PROGRESS_FILE).unlink()
            raise KeyboardInterrupt

    toy_run(tmp_path, conf(12, WSD))
    with monkeypatch.context() as kill:
        kill.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            toy_run(tmp_path, conf(20, WSD))
    _, progress = toy_run(tmp_path, conf(20, WSD))
    assert (progress.step, kept_states(tmp_path)) == (20, ["00000014", "00000020"])


def test_a_run_that_is_extended_in_its_warm_up_ends_it_at_the_same_step(tmp_path):
    """Six steps: half of 12, three tenths of 20."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        toy_run(run, conf(12, CONSTANT, warmup=0.5), interrupt_at=3)
    toy_run(run, conf(20, CONSTANT, warmup=0.5))
    toy_run(whole, conf(20, CONSTANT, warmup=0.3))
    assert_same_end(run, whole)


def test_rows_that_a_draft_writes_are_renewed_where_an_extended_run_begins(tmp_path, caplog):
    """With a constant rate too: the last step is not one at which they are written anew."""
    caplog.set_level(logging.INFO)
    data = DataConf(seed=1, on_policy=OnPolicyConf(share=0.5, interval=5))
    run, whole = tmp_path / "run", tmp_path / "whole"
    toy_run(run, conf(12, CONSTANT, data=data, save_every=None))
    assert kept_states(run) == ["00000010", "00000012"]
    toy_run(run, conf(20, CONSTANT, data=data, save_every=None))
    assert "extended from 12 to 20 steps, from step 10" in caplog.text
    toy_run(whole, conf(20, CONSTANT, warmup=WARMUP_OF_20, data=data, save_every=None))
    assert_same_end(run, whole)


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([1.0, 2.0, 9.0, 1.5, 1.6, 1.2], (1.6, 16)),  # 9.0 was found in steps that are taken anew
        ([1.0, 2.0, 1.9, 1.5, 1.6, 1.2], (2.0, 8)),
    ],
)
def test_what_replaced_steps_have_found_is_forgotten(tmp_path, monkeypatch, measured, best):
    """Measured at steps 4, 8 and 12, and from the state of step 8 on at 12, 16 and 20."""
    lengths = iter(measured)
    monkeypatch.setattr(
        "tests.support.toy_run.toy_length", lambda draft: {"delivered_per_round": next(lengths)}
    )
    toy_run(tmp_path, conf(12, WSD))
    _, progress = toy_run(tmp_path, conf(20, WSD))
    assert (progress.best, progress.best_step) == best


ELSE = "use another run_name or resume=false"


@pytest.mark.parametrize(
    ("started", "now", "line"),
    [
        (
            {"steps": 12}, {"steps": 20},
            "optim.steps: must stay 12 with optim.schedule=cosine, whose rate falls to the last "
            f"step, got 20; {ELSE}, and optim.schedule=wsd or constant for a run to be extended",
        ),
        (
            {"epochs": 2.0}, {"epochs": 3.0},
            "optim.epochs: must stay 2.0 with optim.schedule=cosine, whose rate falls to the last "
            f"step, got 3.0; {ELSE}, and optim.schedule=wsd or constant for a run to be extended",
        ),
        (
            {"steps": 12} | CONSTANT, {"steps": 8} | CONSTANT,
            f"optim.steps: must be above the 12 steps done, got 8; {ELSE}",
        ),
        (
            {"steps": 12} | WSD | {"decay_ratio": 0.9}, {"steps": 20} | WSD | {"decay_ratio": 0.9},
            "optim.steps: the rates up to a saved state (step 12) must be those of the new run, "
            f"got 20 after 12; give more steps, or {ELSE}",
        ),
    ],
    ids=["cosine", "cosine by epochs", "too few", "nothing before the decay"],
)  # fmt: skip
def test_what_cannot_be_extended_is_refused_before_a_model_is_loaded(tmp_path, started, now, line):
    toy_run(tmp_path / "toy", toy_conf(optim={"steps": None} | started))
    changed = toy_conf(optim={"steps": None} | now, output_dir=str(tmp_path))
    state = RunState(tmp_path / "toy", flatten_config(changed))
    state.load_progress()
    steps = known_steps(state, changed.optim)
    with pytest.raises(UserError) as refused:
        find_resume_state(state, changed.optim, steps, multiple=1)
    assert str(refused.value) == line


def test_steps_and_epochs_are_not_both_given():
    with pytest.raises(UserError) as refused:
        OptimConf(steps=270, epochs=2.0)
    assert str(refused.value) == (
        "optim.epochs: must be null if optim.steps is set, got 2.0 and 270 steps; "
        "set one of them to null"
    )
    with pytest.raises(UserError, match=r"optim\.epochs: must be positive, got 0"):
        OptimConf(epochs=0.0)
    assert OptimConf().total_steps(rows=40_000) == 300


def test_epochs_become_steps_once_and_can_be_raised(tmp_path, caplog):
    """24 rows, 4 a step: an epoch and a half are 9 steps, three are 18."""
    caplog.set_level(logging.INFO)
    optim = {"steps": None, **CONSTANT}
    _, progress = toy_run(tmp_path / "run", toy_conf(optim=optim | {"epochs": 1.5}))
    assert (progress.step, progress.steps) == (9, 9)
    assert "9 steps x 4 rows = 36 of 24 rows (1.5 epochs)" in caplog.text
    toy_run(tmp_path / "run", toy_conf(optim=optim | {"epochs": 1.5}))
    assert metrics(tmp_path / "run")[-1]["step"] == 9
    toy_run(tmp_path / "run", toy_conf(optim=optim | {"epochs": 3.0}))
    toy_run(tmp_path / "whole", toy_conf(optim=optim | {"steps": 18, "warmup_ratio": 1 / 18}))
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_rows_and_tokens_seen_are_counted_on_after_a_kill(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(KeyboardInterrupt):
        toy_run(tmp_path, toy_conf(), interrupt_at=7)
    toy_run(tmp_path, toy_conf())
    rows = toy_rows()
    order = RowOrder(seed=1, num_rows=ROWS, rows_per_step=4)
    tokens, answers = 0, 0
    found = {int(line["step"]): line for line in metrics(tmp_path)}
    for step in range(12):
        batch = rows.batch(order.batch_rows(step))
        tokens += int((batch.document_ids >= 0).sum())
        answers += int((batch.answer_mask & (batch.document_ids >= 0)).sum())
        if line := found.get(step + 1):
            assert (line["train/rows"], line["train/epochs"]) == (4 * (step + 1), (step + 1) / 6)
            assert (line["train/tokens"], line["train/answer_tokens"]) == (tokens, answers)
    assert list(found) == [2, 3, 4, 6, 8, 9, 10, 12]
    assert "step 12/12  rows 48  epochs 2  tokens 576  loss" in caplog.text


def test_a_state_holds_what_is_trained_alone(tmp_path):
    draft, _ = toy_run(tmp_path, toy_conf())
    trained = {f"draft.{name}" for name, p in draft.named_parameters() if p.requires_grad}
    assert set(weights(tmp_path)) == trained
    assert "draft.frozen.weight" not in trained
    more = disk_bytes_needed(draft, num_states=3) - disk_bytes_needed(draft, num_states=2)
    assert more == 3 * sum(p.nbytes for p in trained_parameters(draft))
    assert disk_bytes_needed(draft) == 2 * sum(p.nbytes for p in draft.parameters()) + 2 * more


def test_a_setting_that_the_run_of_an_older_version_lacks_is_named(tmp_path):
    toy_run(tmp_path, toy_conf())
    file = tmp_path / "state" / "00000012" / "progress.json"
    saved = json.loads(file.read_text())
    del saved["config"]["held_out_prompts"]
    file.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"^held_out_prompts: .* started without it, got 64; use"):
        RunState(tmp_path, flatten_config(toy_conf())).load_progress()


def saved_steps(folder: Path, conf: TrainConf) -> list[int]:
    saved = []

    def noting(self, learning, parallel, save=RunState.save):
        saved.append(self.progress.step)
        save(self, learning, parallel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunState, "save", noting)
        toy_run(folder, conf)
    return saved


def test_states_are_saved_by_time_at_log_lines_and_always_where_they_are_needed(tmp_path):
    quick, slow = {"save_every": None, "save_minutes": 1e-9}, {"save_every": None}
    assert saved_steps(tmp_path / "quick", toy_conf(**quick)) == [3, 4, 6, 8, 9, 12]
    assert saved_steps(tmp_path / "slow", toy_conf(**slow)) == [12]
    assert saved_steps(tmp_path / "kept", conf(12, WSD, **slow)) == [8, 12]
    data = DataConf(seed=1, on_policy=OnPolicyConf(share=0.5, interval=5))
    assert saved_steps(tmp_path / "rewritten", toy_conf(data=data, **quick)) == [5, 10, 12]
    with pytest.raises(UserError, match=r"save_minutes: must be positive, got 0"):
        toy_conf(save_minutes=0.0)


def test_the_clock_starts_anew_at_every_state():
    saves = SaveSchedule(
        parallel=PARALLEL, minutes=60.0, every_steps=None, multiple=1, required_steps={9}
    )
    saves.read_clock()
    assert not saves.is_due(3)
    saves.saved_at -= 3601
    saves.read_clock()
    assert saves.is_due(4)
    saves.restart()
    saves.read_clock()
    assert (saves.is_due(5), saves.is_due(9)) == (False, True)


def test_room_is_asked_for_one_more_state_where_one_is_kept():
    assert (toy_conf().num_states, conf(12, WSD).num_states, conf(12, CONSTANT).num_states) == (
        2,
        3,
        2,
    )
