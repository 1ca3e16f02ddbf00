"""After five kills and a restart of the server, with every fifth request failing, each row is answered once.

Ctrl-C ends the sixth run.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from data.answers.answering import AnswersReport, answer_rows
from data.prepare import main
from data.sources.prepared_rows import PreparedRow, read_prepared_rows
from infer.engine.answer_backend import TargetAnswerBackend
from models.targets.config import DEMO_TARGET, TargetConf
from models.targets.loading import load_target
from tests.support.commands.ports import find_free_port
from tests.support.data.chat import asked, conf
from tests.support.data.openai_server import restart, serving
from tests.support.models.tiny import CPU
from tests.support.runs.killing import FORKS, TIMEOUT_S

ROWS, KILLS, AT_ONCE = 60, 5, 4  # rows enough that none of the runs to be killed ends by itself
HOW = conf(max_new_tokens=8)


@contextmanager
def start_prepare(folder: Path, port: int) -> Iterator[BaseProcess]:
    """Run `python -m data.prepare ...` in a separate process, and kill it at the end."""
    arguments = [
        "mixture=one",
        f"mixture.sources.rows.path={folder / 'rows.jsonl'}",
        *"mixture.exclude=[] mixture.held_out=0.1 target=demo answers=endpoint".split(),
        f"output_dir={folder}",
        "run_name=run",
        f"answers.url=http://127.0.0.1:{port}/v1",
        "answers.max_new_tokens=8",
        f"answers.concurrency={AT_ONCE}",
    ]
    run = FORKS.Process(target=run_command, args=(arguments, folder))
    run.start()
    try:
        yield run
    finally:
        run.kill()
        run.join()


def run_command(arguments: list[str], folder: Path) -> None:
    """Run the command with these arguments; its output goes to a file."""
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's `&`
    sys.argv = ["data.prepare", *arguments]
    main()


def wait_until(met: Callable[[], bool], run: BaseProcess, folder: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not met():
        assert run.is_alive(), (folder / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_row_is_answered_once_whatever_is_killed(tmp_path):
    rows = asked(ROWS)
    lines = [json.dumps({"id": row.id, "messages": row.messages}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    journal = tmp_path / "run" / "answers-00000-of-00001.jsonl"

    def count_lines() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    port = find_free_port()
    with serving(DEMO_TARGET, port=port, name="demo", faulty=True) as watcher:
        for number in range(KILLS + 1):
            before, end = count_lines(), signal.SIGKILL if number < KILLS else signal.SIGINT
            with start_prepare(tmp_path, port) as run:
                wait_until(lambda least=before + 2: count_lines() >= least, run, tmp_path)
                if number == KILLS // 2:
                    restart(watcher)
                    at_restart = count_lines()
                    wait_until(lambda least=at_restart + 2: count_lines() >= least, run, tmp_path)
                assert run.pid is not None
                os.kill(run.pid, end)
                run.join(TIMEOUT_S)
            assert run.exitcode == (-end if end == signal.SIGKILL else 128 + end)
            assert before < count_lines() < ROWS
        assert (tmp_path / "output").read_text().endswith("\ninterrupted\n")
        assert len(read_finished_ids(journal)) == count_lines()
        with start_prepare(tmp_path, port) as run:
            run.join(TIMEOUT_S)
    output = (tmp_path / "output").read_text()
    assert run.exitcode == 0, output
    assert "rows are already answered" in output

    answered = {row.id: row for row in read_prepared_rows(tmp_path / "run")}
    held_out = {row.id for row in read_prepared_rows(tmp_path / "run", "held_out")}
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(answered) == report["train"] == report["answers"]["rows"]
    assert report["read"] == ROWS == report["train"] + report["held_out"] + report["dropped"]
    assert held_out.isdisjoint(answered)
    assert answered == answer_in_process(rows, set(answered), tmp_path)
    assert not journal.exists()


def read_finished_ids(journal: Path) -> set[str]:
    """Return the ids of the rows that have a complete line."""
    lines = journal.read_bytes().splitlines(keepends=True)
    return {json.loads(line)["id"] for line in lines if line.endswith(b"\n")}


def answer_in_process(rows: list[PreparedRow], ids: set[str], folder: Path) -> dict[str, PreparedRow]:
    """Answer the same rows by the target, without a server and without a kill."""
    target = load_target(TargetConf(), CPU)
    own = {}
    for row in rows:
        (row_id,) = [prepared_id for prepared_id in ids if prepared_id.startswith(f"{row.id}-")] or [None]
        if row_id is not None:
            own[row_id] = PreparedRow(id=row_id, source="rows", messages=row.messages)
    answers = answer_rows(
        own.values(),
        TargetAnswerBackend(target, HOW),
        target.tokenizer,
        HOW,
        folder / "own",
        report=AnswersReport(),
        total=len(own),
    )
    return {row.id: row for row in answers}
