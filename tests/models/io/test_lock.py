"""Only a single process writes in a run's folder, and a dead process locks nobody out."""

import errno
import fcntl
import multiprocessing
import signal
import threading
from contextlib import contextmanager

import pytest

from models.io import lock
from models.io.errors import UserError
from tests.support.models.tiny import CPU
from tests.support.runs.toy_run import toy_conf
from train.config.run import ParallelConf
from train.distributed.build import build_parallel
from train.run.folder import open_run

FORK = multiprocessing.get_context("fork")


@contextmanager
def hold_elsewhere(folder):
    """Start another process that holds the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    there, here = FORK.Pipe()
    holder = FORK.Process(target=hold_and_wait, args=(folder, there))
    holder.start()
    try:
        assert here.recv() == "held"
        yield holder
    finally:
        holder.kill()
        holder.join()


def hold_and_wait(folder, there):
    lock.acquire_lock(folder)
    there.send("held")
    signal.pause()


def test_every_command_that_writes_results_is_refused_until_the_holder_is_killed(tmp_path):
    run = tmp_path / "run"
    conf = toy_conf(output_dir=str(tmp_path), run_name="run", resume=False)
    commands = {
        "train": lambda: open_run(conf, build_parallel(ParallelConf(), CPU, trackers=[])),
        "infer": lambda: lock.claim_run_folder(run),
    }
    with hold_elsewhere(run) as holder:
        (run / "metrics.jsonl").write_text("of the holder")
        for start in commands.values():
            with pytest.raises(UserError, match=f"held by process {holder.pid} on .* since 20"):
                start()
        assert (run / "metrics.jsonl").read_text() == "of the holder"
        holder.kill()
        holder.join()
        for start in commands.values():
            start()
            lock.release_lock(run)


def test_a_run_that_is_started_again_waits_for_a_vanished_holder(tmp_path):
    """A network file system keeps the lock of a dead node for a while."""
    with hold_elsewhere(tmp_path) as holder:
        with pytest.raises(UserError, match=r"^run_name: .* held by process"):
            lock.acquire_lock(tmp_path, timeout_s=0.2)
        timer = threading.Timer(0.5, holder.kill)
        timer.start()
        lock.acquire_lock(tmp_path, timeout_s=60.0)
    lock.release_lock(tmp_path)


def test_the_remedy_names_the_setting_that_chose_the_folder(tmp_path):
    with (
        hold_elsewhere(tmp_path),
        pytest.raises(UserError, match=r"^output_dir: .*; wait until .*, or choose another output_dir"),
    ):
        lock.acquire_lock(tmp_path, key="output_dir")


def test_a_process_may_lock_its_folder_twice_and_release_it_once(tmp_path):
    lock.acquire_lock(tmp_path)
    lock.acquire_lock(tmp_path)
    lock.release_lock(tmp_path)
    with hold_elsewhere(tmp_path), pytest.raises(UserError, match="held by"):
        lock.acquire_lock(tmp_path)


def test_a_file_system_without_locks_is_reported_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock.acquire_lock(tmp_path)
    lock.release_lock(tmp_path)
    assert "cannot be locked on this file system (No locks available)" in caplog.text


def test_a_lock_that_cannot_be_opened_is_refused_in_a_single_line(tmp_path):
    (tmp_path / lock.LOCK_FILE).mkdir()  # stands for a file of another user, which root could write
    with pytest.raises(UserError, match=r"^output_dir: must be a writable folder, got .*/lock \("):
        open_run(
            toy_conf(output_dir=str(tmp_path.parent), run_name=tmp_path.name),
            build_parallel(ParallelConf(), CPU, trackers=[]),
        )


def test_a_child_that_outlives_its_parent_does_not_hold_the_folder(tmp_path):
    lock.acquire_lock(tmp_path)
    child = FORK.Process(target=signal.pause)
    child.start()
    lock.release_lock(tmp_path)
    try:
        with hold_elsewhere(tmp_path):
            assert child.is_alive()
    finally:
        child.kill()
        child.join()
