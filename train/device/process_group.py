"""Start processes as torchrun does, and read what each of them reports of the same checks."""

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment

from data.chat.processes import exit_with_parent
from train.device.checks import CheckFailedError, shorten_error

TIMEOUT_S = 60.0
START_S = 180.0  # until the first result: processes import PyTorch and open the device
POLL_S = 0.05
Report = Callable[[str, Callable[[], str]], None]  # runs a function, and reports its result under a name


@dataclass(kw_only=True)
class ProcessGroup:
    """Processes that do the same work, each on a device of its own; the first result that is read starts them."""

    processes: int
    folder: Path
    work: Callable[..., None]  # takes a Report and `arguments`
    arguments: tuple[Any, ...] = ()  # can be pickled
    timeout_s: float = TIMEOUT_S  # of the wait for a result
    failure: str | None = None  # that stopped all of them

    @cached_property
    def workers(self) -> list[SpawnProcess]:
        self.folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        size, workers = self.processes, []
        launch = {"master_addr": "127.0.0.1", "master_port": port, "world_size": size, "local_world_size": size}
        launch["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS", 1)
        for rank in range(size):
            arguments = (self.folder / str(rank), self.work, self.arguments)
            # A daemon ends with its parent's exit.
            worker = multiprocessing.get_context("spawn").Process(target=run_worker, args=arguments, daemon=True)
            with patch_environment(rank=rank, local_rank=rank, **launch):  # as torchrun, before PyTorch is imported
                worker.start()
            workers.append(worker)
        return workers

    def read_result(self, name: str) -> str:
        """Wait until every process has reported, and return what all of them did; raise CheckFailedError otherwise."""
        if self.failure is not None:
            raise CheckFailedError(f"not run: {self.failure}")
        timeout_s = self.timeout_s if "workers" in self.__dict__ else START_S
        end = time.monotonic() + timeout_s
        while True:
            ended = {rank for rank, worker in enumerate(self.workers) if worker.exitcode is not None}
            reports = self._read_reports(name)  # afterwards, because a process may end after its last report
            missing = {rank for rank, report in enumerate(reports) if report is None}
            if not missing:
                return combine_reports([report for report in reports if report is not None])
            if missing & ended or time.monotonic() > end:
                self._fail(name, sorted(missing & ended or missing), timeout_s)
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Kill the processes, if they were started."""
        for worker in self.__dict__.get("workers", ()):
            worker.kill()
            worker.join()

    def _fail(self, name: str, ranks: list[int], timeout_s: float) -> None:
        """Stop the processes because of some of them."""
        code = self.workers[ranks[0]].exitcode
        how = f"gave no result in {timeout_s:g} s" if code is None else f"ended with exit code {code}"
        output = "".join((self.folder / f"{rank}.log").read_text(errors="replace") for rank in ranks)
        last = (output.splitlines() or ["nothing"])[-1]
        self.failure = f"process {', '.join(map(str, ranks))} {how} at '{name}'; its output ends in: {last}"
        self.stop()
        raise CheckFailedError(self.failure)

    def _read_reports(self, name: str) -> list[dict[str, str] | None]:
        """Return the report of each process, None where there is none yet."""
        files = [self.folder / f"{rank}.jsonl" for rank in range(self.processes)]
        texts = [file.read_text() if file.exists() else "" for file in files]
        # A line without an end is being written.
        reports = [map(json.loads, text.rpartition("\n")[0].splitlines()) for text in texts]
        return [next((line for line in lines if line["name"] == name), None) for lines in reports]


def combine_reports(reports: list[dict[str, str]]) -> str:
    """Return the text that all processes report; raise CheckFailedError for an error or another text.

    >>> combine_reports([{"detail": "4 numbers"}, {"detail": "4 numbers"}])
    '4 numbers'
    """
    for rank, report in enumerate(reports):
        if "error" in report:
            raise CheckFailedError(f"process {rank}: {report['error']}")
    details = [report["detail"] for report in reports]
    if len(set(details)) > 1:
        raise CheckFailedError(f"the processes differ: {'; '.join(details)}")
    return details[0]


def run_worker(path: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Do the work in a process of its own; results go to `path`.jsonl, output to `path`.log."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):  # libraries of collectives print to both
        os.dup2(log, stream)

    def report(name: str, function: Callable[[], str]) -> None:
        try:
            result = {"detail": function()}
        except Exception as error:  # noqa: BLE001 - a device may raise anything
            result = {"error": shorten_error(error)}
        with path.with_suffix(".jsonl").open("a") as file:
            file.write(json.dumps({"name": name, **result}) + "\n")

    work(report, *arguments)
