"""Killed five times, its server restarted, every fifth request failing: each row answered once."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data.answers.answering import AnswersReport, answer_rows
from data.prepared import Row, read
from infer.answering import TargetAsker
from models.target import DEMO, TargetConf
from tests.chat import asked, conf
from tests.killing import ROOT, TIMEOUT_S
from tests.openai_server import free_port, restart, serving
from tests.tiny import CPU

ROWS, KILLS, AT_ONCE = 42, 5, 4
HOW = conf(max_new_tokens=8)
SERVED = str(DEMO), "--name", "demo", "--faulty"


def command(folder: Path, port: int) -> subprocess.Popen:
    """The command as a user types it."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "data.prepare", "mixture=one", "target=demo", "answers=endpoint",
            f"mixture.sources.rows.path={folder / 'rows.jsonl'}", "mixture.held_out=0.1",
            f"output_dir={folder}", "run_name=run", f"answers.url=http://127.0.0.1:{port}/v1",
            "answers.max_new_tokens=8", f"answers.concurrency={AT_ONCE}", "answers.timeout_s=3",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def until(met: Callable[[], bool], run: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not met():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_row_is_answered_once_whatever_is_killed(tmp_path):
    rows = asked(ROWS)
    lines = [json.dumps({"id": row.id, "messages": row.messages}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    journal = tmp_path / "run" / "work" / "worker-00000" / "answers.jsonl"

    def done() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    port = free_port()
    with serving(*SERVED, port=port) as watcher:
        for number in range(KILLS):
            before = done()
            with command(tmp_path, port) as run:
                until(lambda least=before + 2: done() >= least, run)
                if number == KILLS // 2:
                    restart(watcher)
                    at_restart = done()
                    until(lambda least=at_restart + 2: done() >= least, run)
                run.kill()
            assert before < done() < ROWS
        with command(tmp_path, port) as run:
            said, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, said
    assert "rows are there already" in said

    answered = {row.id: row for row in read(tmp_path / "run")}
    held_out = {row.id for row in read(tmp_path / "run", "held_out")}
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(answered) == report["train"] == report["answers"]["rows"]
    assert report["read"] == ROWS == report["train"] + report["held_out"] + report["dropped"]
    assert held_out.isdisjoint(answered)
    assert answered == as_in_one_process(rows, set(answered), tmp_path)
    assert not journal.parent.parent.exists()


def as_in_one_process(rows: list[Row], ids: set[str], folder: Path) -> dict[str, Row]:
    """The same rows, answered by the target without a server and without a kill."""
    target = TargetConf().build(CPU)
    own = {}
    for row in rows:
        (given,) = [each for each in ids if each.startswith(f"{row.id}-")] or [None]
        if given is not None:
            own[given] = Row(id=given, source="rows", messages=row.messages)
    made = answer_rows(
        own.values(), TargetAsker(target, HOW), target.tokenizer, HOW, folder / "own",
        report=AnswersReport(),
    )  # fmt: skip
    return {row.id: row for row in made}
