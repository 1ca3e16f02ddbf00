"""Saved states are complete or absent; they continue the same run, and others are refused."""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.config import DataConf, DataSource, OnPolicyConf
from models.checkpoints.saved_states import PROGRESS_FILE, find_newest_state
from models.io.errors import UserError
from models.io.files import PARTIAL_SUFFIX
from models.trees.sampling_config import SamplingConf
from tests.support.models.tiny import CPU
from tests.support.runs.killing import finish, kill, kill_while_saving, newest_step
from tests.support.runs.toy_run import metrics, toy_conf, toy_run, weights
from train.config.run import ParallelConf, TrainConf
from train.distributed.build import build_parallel
from train.run.state import RunState, SaveSchedule, flatten_config


@pytest.fixture(params=[False, True], ids=["live", "in memory"])
def started(tmp_path, request):
    """Stop a run of twelve steps after step 8, with features computed live and stored in memory."""
    conf = toy_conf(data=DataConf(seed=1, keep_features=request.param))
    run_toy_until(tmp_path, conf, stop=8)
    return tmp_path, conf


class StepReached(Exception):  # noqa: N818  # it is not an error
    pass


def run_toy_until(folder, conf, *, stop: int):
    def stopping(self, learning, parallel, save=RunState.save):
        save(self, learning, parallel)
        if self.progress.step == stop:
            raise StepReached

    with pytest.MonkeyPatch.context() as patch, suppress(StepReached):
        patch.setattr(RunState, "save", stopping)
        toy_run(folder, conf)


def test_a_resumed_run_ends_in_the_same_weights_bit_for_bit(started, tmp_path_factory):
    folder, conf = started
    _, progress = toy_run(folder, conf)
    unbroken = tmp_path_factory.mktemp("unbroken")
    _, expected = toy_run(unbroken, conf)
    assert progress == expected
    assert_equal(weights(folder), weights(unbroken))


@pytest.mark.parametrize(
    ("changed", "is_chosen_anew"),
    [
        ({}, False),
        ({"prompts_per_category": 3}, False),
        ({"sampling": SamplingConf(temperature=1.0)}, True),
        ({"max_new_tokens": 5}, True),
    ],
)
def test_a_best_checkpoint_is_beaten_by_figures_of_the_same_measurement_alone(tmp_path, changed, is_chosen_anew):
    conf = toy_conf()
    run_toy_until(tmp_path, conf, stop=8)
    state = RunState(tmp_path, flatten_config(replace(conf, evaluation=replace(conf.evaluation, **changed))))
    state.load_progress()
    state.progress.best, state.progress.best_step = 2.5, 8
    state.drop_incomparable_best()
    assert (state.progress.best, state.progress.best_step) == ((None, None) if is_chosen_anew else (2.5, 8))


def test_a_state_from_before_a_key_goes_on(tmp_path):
    conf = toy_conf()
    run_toy_until(tmp_path, conf, stop=8)
    state = RunState(tmp_path, flatten_config(conf))
    progress = find_newest_state(tmp_path) / PROGRESS_FILE
    saved = json.loads(progress.read_text())
    for key in ("measure", "device.cuda_graphs", "optim.recompute"):
        del saved["config"][key]
    progress.write_text(json.dumps(saved))
    state.load_progress()
    assert state.progress.step == 8
    with pytest.raises(UserError, match=r"^measure: the run was started with True, got False"):
        RunState(tmp_path, flatten_config(replace(conf, measure=False))).load_progress()


@pytest.mark.system
def test_a_run_killed_twice_ends_in_the_same_weights_bit_for_bit(tmp_path):
    killed, changes = tmp_path / "killed", {"optim": {"steps": 60}}
    kill(killed, changes, when=lambda: newest_step(killed) >= 10)
    kill_while_saving(killed, changes, step=30)
    finish(killed, changes)
    toy_run(tmp_path / "unbroken", toy_conf(**changes))
    assert_equal(weights(killed), weights(tmp_path / "unbroken"))
    assert [m["step"] for m in metrics(killed)] == [m["step"] for m in metrics(tmp_path / "unbroken")]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_no_step_appears_twice_in_the_metrics(started):
    folder, conf = started
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/loss": 1.0}\n{"step": 10, "tra')  # written, then killed
    toy_run(folder, conf)
    steps = [line["step"] for line in metrics(folder)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12


def test_a_single_state_stays_and_leftovers_are_removed(started):
    folder, conf = started
    (folder / "state" / f"00000010{PARTIAL_SUFFIX}").mkdir()
    (folder / "state" / "00000002").mkdir()
    toy_run(folder, conf)
    assert [path.name for path in (folder / "state").iterdir()] == ["00000012"]


def test_what_a_user_puts_beside_the_states_is_no_state_and_stays(started):
    folder, conf = started
    shutil.copytree(folder / "state/00000008", folder / "state/keep-8")
    (folder / "state/notes.txt").write_text("the rate is too high")
    toy_run(folder, conf)
    assert {path.name for path in (folder / "state").iterdir()} == {"00000012", "keep-8", "notes.txt"}
    assert find_newest_state(folder) == folder / "state/00000012"


def test_a_damaged_state_is_refused_in_one_line(started):
    folder, conf = started
    (folder / "state/00000008" / PROGRESS_FILE).write_text('{"version":')
    with pytest.raises(UserError, match=r"^run_name: must name a run whose state is intact, got .*progress.json \("):
        toy_run(folder, conf)


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [("optim.lr", 0.003, 0.001), ("seed", 0, 5), ("interval.eval", 4, 6), ("draft.dropout", 0.1, 0.2)],
)
def test_a_changed_config_is_refused_by_its_key(started, key, before, now):
    folder, conf = started
    group, _, name = key.rpartition(".")
    part = replace(getattr(conf, group), **{name: now}) if group else now
    changed = replace(conf, **{group or name: part})
    with pytest.raises(UserError) as refused:
        RunState(folder, flatten_config(changed)).load_progress()
    assert str(refused.value) == (
        f"{key}: the run was started with {before}, got {now}; use another run_name or resume=false"
    )


@pytest.mark.parametrize(
    ("unread", "read"),
    [({"data.column": "messages"}, {"data.source": "demo"}), ({"tree.nodes": 24}, {"tree.kind": "chain"})],
)
def test_a_run_started_with_a_key_that_it_never_read_continues_without_it(started, unread, read):
    folder, conf = started
    file = find_newest_state(folder) / PROGRESS_FILE
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"config": saved["config"] | read | unread}))
    state = RunState(folder, flatten_config(conf) | read)
    state.load_progress()
    assert state.progress.step


def test_every_setting_of_what_is_learned_is_kept(started):
    folder, conf = started
    saved = flatten_config(conf)
    free = (
        "data.license",
        *(f"data.{name}" for name in DataSource.demo.unread_keys),
        "optim.steps",
        "optim.epochs",
        "optim.micro_batch_size",
        "optim.recompute",
    )
    learned = [
        key
        for key in saved
        if key.startswith(("target.", "draft.", "data.", "loss.", "optim.")) and key not in (*free, "loss.logits_chunk")
    ]
    assert {"target.name", "draft.dropout", "data.demo.num_prompts", "loss.name", "optim.lr"} <= set(learned)
    for key in learned:
        with pytest.raises(UserError, match=rf"^{re.escape(key)}: the run was started with "):
            RunState(folder, saved | {key: "another"}).load_progress()


def test_settings_that_change_at_most_the_rounding_may_change(started):
    folder, conf = started
    changed = replace(
        conf,
        interval=replace(conf.interval, log=5, save=7),
        resume=False,
        optim=replace(conf.optim, micro_batch_size=1),
    )
    state = RunState(folder, flatten_config(changed))
    state.load_progress()
    assert state.progress.step == 8


def test_a_run_of_an_earlier_version_is_refused_with_its_version(started):
    folder, conf = started
    progress = folder / "state" / "00000008" / "progress.json"
    saved = json.loads(progress.read_text())
    saved["version"] = 2
    progress.write_text(json.dumps(saved))
    with pytest.raises(UserError) as refused:
        RunState(folder, flatten_config(conf)).load_progress()
    assert str(refused.value) == (
        f"run_name: must name a run of version 4, got 2 in {folder}; use another run_name or resume=false"
    )


def test_a_state_holds_trained_weights_alone(tmp_path):
    draft, _ = toy_run(tmp_path, toy_conf())
    trained = {f"draft.{name}" for name, p in draft.named_parameters() if p.requires_grad}
    assert set(weights(tmp_path)) == trained
    assert "draft.frozen.weight" not in trained


def list_saved_steps(folder: Path, conf: TrainConf) -> list[int]:
    saved = []

    def record_step(self, learning, parallel, save=RunState.save):
        saved.append(self.progress.step)
        save(self, learning, parallel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunState, "save", record_step)
        toy_run(folder, conf)
    return saved


def test_states_are_saved_by_time_at_log_lines_and_always_at_the_end(tmp_path):
    quick, slow = {"save": None, "save_minutes": 1e-9}, {"save": None}
    assert list_saved_steps(tmp_path / "quick", toy_conf(interval=quick)) == [3, 4, 6, 8, 9, 12]
    assert list_saved_steps(tmp_path / "slow", toy_conf(interval=slow)) == [12]
    with pytest.raises(UserError, match=r"interval.save_minutes: must be positive, got 0"):
        toy_conf(interval={"save_minutes": 0.0})


def test_a_draft_that_writes_rows_saves_a_state_where_it_rewrites_them(tmp_path):
    data = DataConf(seed=1, on_policy=OnPolicyConf(share=0.5, interval=5))
    assert list_saved_steps(tmp_path, toy_conf(data=data, interval={"save": None})) == [5, 10, 12]


def test_the_clock_restarts_at_every_state():
    saves = SaveSchedule(parallel=build_parallel(ParallelConf(), CPU, trackers=[]), minutes=60.0, every_steps=None)
    saves.read_clock()
    assert not saves.is_due(3)
    saves.saved_at -= 3601
    saves.read_clock()
    assert saves.is_due(4)
    saves.restart()
    saves.read_clock()
    assert not saves.is_due(5)
