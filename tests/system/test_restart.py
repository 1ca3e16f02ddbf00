"""A run goes on when its launcher restarts it, and a launch that could not restart is refused."""

import pytest
import torch

from models.io.errors import UserError
from models.parallel import torchrun
from tests.support.models.tiny import CPU
from tests.support.runs import launch_script
from tests.support.runs.killing import kill_worker, launcher, newest_step
from tests.support.runs.toy_run import metrics, toy_conf, toy_run, weights
from train.config.run import ParallelConf
from train.distributed.build import build_parallel
from train.run.folder import open_run

SEVERAL_NODES = {
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_the_run_of_a_killed_worker_goes_on_with_new_ones(tmp_path):
    killed, changes = (tmp_path / "killed", {"dropout": 0.0, "optim": {"steps": 30, "max_grad_norm": 1e3}})
    with launcher(killed, changes, processes=2, restarts=1) as run:
        kill_worker(run, 1, when=lambda: newest_step(killed) >= 6)
    toy_run(tmp_path / "unbroken", toy_conf(**changes))
    ours, theirs = weights(killed), weights(tmp_path / "unbroken")
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=0, msg=name)
    assert [m["step"] for m in metrics(killed)] == [m["step"] for m in metrics(tmp_path / "unbroken")]


def test_processes_connect_anew_for_each_job_of_a_sweep():
    launch_script("../commands/connect_run.py", "3", processes=4)


def test_a_restart_resumes_a_run_that_its_launch_has_started_over(tmp_path, monkeypatch):
    conf = toy_conf(resume=False, output_dir=str(tmp_path))
    metrics_file = tmp_path / conf.run_name / "metrics.jsonl"
    metrics_file.parent.mkdir()
    for launch, resumes in (("a", False), ("a", True), ("b", False)):
        metrics_file.touch()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        open_run(conf, build_parallel(ParallelConf(), CPU, trackers=[]))
        assert metrics_file.exists() is resumes


def test_restarts_of_several_nodes_need_a_store_for_each_attempt(monkeypatch):
    for name, value in SEVERAL_NODES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE: must be 1 if sev"):
        torchrun.check_launch()
    for name, harmless in (
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("LOCAL_WORLD_SIZE", "4"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, harmless)
            torchrun.check_launch()


def test_a_number_of_processes_that_no_launcher_set_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"^WORLD_SIZE: must come from a launcher, got 2 without RANK, MASTER_ADDR, MA"):
        build_parallel(ParallelConf(), CPU, trackers=[])
