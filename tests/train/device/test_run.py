"""A check that crashes or hangs fails by itself, and the others still run."""

from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from models.device.config import DeviceConf, DeviceName
from train.config.device_check import DeviceCheckConf
from train.device import run
from train.device.checks import Outcome, OutcomeFile

pytestmark = pytest.mark.system  # each stage is a process


def run_fake(folder: Path, stage: str, *, minutes: float = 5.0) -> dict[str, Outcome]:
    """Run a stage of tests/support/stages/ on the CPU, and return the outcomes by their names."""
    conf = DeviceCheckConf(device=DeviceConf(name=DeviceName.cpu, compile=False), minutes=minutes)
    run.run_stage(conf, stage, folder / "outcomes.jsonl", package="tests.support.stages")
    outcomes = OutcomeFile(folder / "outcomes.jsonl").read_outcomes()
    assert {outcome.stage for outcome in outcomes} == {stage}
    return {outcome.name: outcome for outcome in outcomes}


def test_a_crash_fails_its_check_with_the_exit_code_and_the_next_check_runs_in_a_new_process(tmp_path):
    outcomes = run_fake(tmp_path, "crashing")
    assert list(outcomes) == ["before", "exit", "between", "signal", "after"]
    for name, code, remedy in (("exit", 3, "do not exit"), ("signal", -9, "do not kill")):
        assert (outcomes[name].result, outcomes[name].remedy) == ("FAIL", remedy)
        assert outcomes[name].detail == f"ended the process with exit code {code}"
    processes = [outcomes[name] for name in ("before", "between", "after")]
    assert {outcome.result for outcome in processes} == {"PASS"}
    assert len({outcome.detail for outcome in processes}) == 3


def test_a_check_that_hangs_fails_and_the_next_check_runs_in_a_new_process(tmp_path, monkeypatch):
    """Each wait ends as soon as the check hangs, in place of a timeout."""
    outcomes, timeouts = OutcomeFile(tmp_path / "outcomes.jsonl"), []
    join = SpawnProcess.join

    def wait_for_hang(process, timeout=None):
        if timeout is None:
            join(process)
            return
        timeouts.append(timeout)
        while process.exitcode is None and (outcomes.find_unfinished() or ("", "", ""))[1] != "hang":
            join(process, 0.1)

    monkeypatch.setattr(SpawnProcess, "join", wait_for_hang)
    results = run_fake(tmp_path, "hanging")
    assert [results[name].result for name in ("before", "hang", "after")] == ["PASS", "FAIL", "PASS"]
    assert (results["hang"].detail, results["hang"].remedy) == ("did not end in time", "do not hang")
    assert all(timeout >= run.GRACE_S for timeout in timeouts)


def test_a_stage_that_ends_before_its_first_check_fails_once(tmp_path):
    (outcome,) = run_fake(tmp_path, "unlisted").values()
    assert (outcome.name, outcome.result) == (run.OPENING, "FAIL")
    assert outcome.detail == "ended the process with exit code 5"
    assert outcome.remedy


def test_a_stage_that_cannot_be_imported_fails_once(tmp_path):
    (outcome,) = run_fake(tmp_path, "missing").values()
    assert (outcome.name, outcome.result) == (run.OPENING, "FAIL")
    assert outcome.detail == "ended the process with exit code 1"


def test_a_stage_that_fails_behind_its_last_check_fails_too(tmp_path):
    first, last = run_fake(tmp_path, "closing").values()
    assert (first.name, first.result) == ("only", "PASS")
    assert (last.name, last.result) == (run.CLOSING, "FAIL")
    assert last.detail == "ended the process with exit code 6"
    assert last.remedy
