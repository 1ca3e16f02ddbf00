"""Promises of saved states: whole or absent, the same run or refused."""

import json
import resource
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from data.config import DataConf
from models.drafts.base import Draft
from models.errors import UserError
from models.files import PARTIAL_SUFFIX
from tests.support.killing import finish, kill, kill_while_saving, newest_step
from tests.support.methods import CASES
from tests.support.toy_run import metrics, toy_conf, toy_run, weights
from train.log import drop_later_lines
from train.run import (
    check_disk_space,
    create_run_dir,
    disk_bytes_needed,
    report_full_disk,
    reset_run_dir,
)
from train.state import RunProgress, RunState, flatten_config


@pytest.fixture(params=[False, True], ids=["live", "kept"])
def started(tmp_path, request):
    """A run of twelve steps that was stopped after step 8, with live and with kept features."""
    conf = toy_conf(data=DataConf(seed=1, keep_features=request.param))
    toy_run_until(tmp_path, conf, stop=8)
    return tmp_path, conf


class Stopped(Exception):  # noqa: N818  # it is no error
    pass


def toy_run_until(folder, conf, *, stop: int):
    def stopping(self, learning, parallel, save=RunState.save):
        save(self, learning, parallel)
        if self.progress.step == stop:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch, suppress(Stopped):
        patch.setattr(RunState, "save", stopping)
        toy_run(folder, conf)


def test_a_resumed_run_ends_in_the_same_weights_bit_for_bit(started, tmp_path_factory):
    folder, conf = started
    _, progress = toy_run(folder, conf)
    whole = tmp_path_factory.mktemp("whole")
    _, unbroken = toy_run(whole, conf)
    assert progress == unbroken
    assert_equal(weights(folder), weights(whole))


@pytest.mark.system
def test_a_run_killed_twice_ends_in_the_same_weights_bit_for_bit(tmp_path):
    killed, changes = tmp_path / "killed", {"optim": {"steps": 60}}
    kill(killed, changes, when=lambda: newest_step(killed) >= 10)
    kill_while_saving(killed, changes, step=30)
    finish(killed, changes)
    toy_run(tmp_path / "whole", toy_conf(**changes))
    assert_equal(weights(killed), weights(tmp_path / "whole"))
    assert [m["step"] for m in metrics(killed)] == [m["step"] for m in metrics(tmp_path / "whole")]


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


def test_one_state_is_kept_and_leftovers_are_swept(started):
    folder, conf = started
    (folder / "state" / f"00000010{PARTIAL_SUFFIX}").mkdir()
    (folder / "state" / "00000002").mkdir()
    toy_run(folder, conf)
    assert [path.name for path in (folder / "state").iterdir()] == ["00000012"]


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("optim.lr", 0.003, 0.001),
        ("seed", 0, 5),
        ("eval_every", 4, 6),
        ("draft.dropout", 0.1, 0.2),
    ],
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


def test_what_does_not_change_the_weights_may_change(started):
    folder, conf = started
    changed = replace(conf, log=replace(conf.log, interval=5), save_every=7, resume=False)
    state = RunState(folder, flatten_config(changed))
    state.load_progress()
    assert state.progress.step == 8


@pytest.mark.parametrize("key", ["optim.micro_batch_size", "loss.logits_chunk"])
def test_how_sums_are_grouped_may_change_and_it_is_said(started, caplog, key):
    folder, conf = started
    group, name = key.split(".")
    changed = replace(conf, **{group: replace(getattr(conf, group), **{name: 1})})
    state = RunState(folder, flatten_config(changed))
    state.load_progress()
    assert state.progress.step == 8
    assert f"{key}: the run was started with " in caplog.text


def test_a_run_of_an_earlier_version_is_refused_with_its_version(started):
    folder, conf = started
    progress = folder / "state" / "00000008" / "progress.json"
    saved = json.loads(progress.read_text())
    del saved["version"]  # as the first version wrote it
    progress.write_text(json.dumps(saved))
    with pytest.raises(UserError) as refused:
        RunState(folder, flatten_config(conf)).load_progress()
    assert str(refused.value) == (
        f"run_name: must name a run of version 2, got version 1 in {folder}; "
        "use another run_name or resume=false"
    )


def test_another_thread_count_is_said(started, caplog):
    folder, conf = started
    saved = folder / "state" / "00000008" / "progress.json"
    saved.write_text(saved.read_text().replace('"threads": 1', '"threads": 3'))
    RunState(folder, flatten_config(conf)).load_progress()
    assert "threads: the run was started with 3 and continues with 1" in caplog.text


def test_a_finished_run_is_not_trained_further(started):
    folder, conf = started
    toy_run(folder, conf)
    before = weights(folder)
    draft, progress = toy_run(folder, conf)
    assert progress.step == 12
    assert_equal(before, weights(folder))
    assert torch.equal(draft.lm_head.weight, before["draft.lm_head.weight"])


def test_starting_over_forgets_the_state(started):
    folder, _ = started
    reset_run_dir(folder)
    assert [path.name for path in folder.iterdir()] == ["lock"]
    state = RunState(folder, {})
    state.load_progress()
    assert state.progress == RunProgress()


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match=r"output_dir: must be a writable folder, got .*file/run \("
    ):
        create_run_dir(tmp_path / "file" / "run")


def test_too_little_room_is_refused(tmp_path):
    huge = Draft()
    with torch.device("meta"):
        huge.layer = torch.nn.Linear(10**8, 10**8)
    with pytest.raises(UserError, match=r"output_dir: needs 3[0-9]{8}.* GB of free disk space"):
        check_disk_space(tmp_path, huge)


@pytest.mark.parametrize("name", ["medusa", "medusa2"])
def test_an_adapted_target_needs_room_for_the_old_and_the_new_one(name, target, tmp_path):
    draft = CASES[name].build(target)
    draft.save(tmp_path, target)
    adapted = [load_file(file) for file in tmp_path.glob("target-*/*.safetensors")]
    assert len(adapted) == (name == "medusa2")
    held = sum(tensor.nbytes for tensors in adapted for tensor in tensors.values())
    assert disk_bytes_needed(draft, target) - disk_bytes_needed(draft) == 2 * held


@pytest.mark.parametrize("room", [0, 1500, 3000, 5000])
def test_a_disk_that_fills_up_is_one_line_and_the_last_state_is_kept(tmp_path, monkeypatch, room):
    """A limit on the size of files fails their writes as a full disk does, wherever they are."""
    measured = []

    def shrink(draft):
        measured.append(draft)
        if len(measured) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        return {"delivered_per_round": 1.0}

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr("tests.support.toy_run.toy_length", shrink)
    try:
        with pytest.raises(UserError, match="output_dir: the disk is full, got"):
            toy_run(tmp_path, toy_conf())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["00000006"]


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="shape"), report_full_disk(tmp_path):
        raise RuntimeError("shape mismatch")


def test_forgetting_keeps_what_came_before(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    drop_later_lines(file, after=2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
