"""Do the same work on many items in several processes, with the outcome of one.

Results come in the order of the items, and the first fault in that order is raised after the
results before it, as `map` does. A bounded number of items is in memory at a time.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from models.errors import UserError

FEW_ITEMS = 1000  # fewer are done before other processes have started
BATCH_ITEMS = 32  # that a process takes at a time; each may be megabytes
BATCHES_AHEAD = 2  # for each process, so that none waits for its next batch
MAX_PROCESSES = 16  # more would wait for this one, which reads the items and collects the results
Item = TypeVar("Item")
Result = TypeVar("Result")
Collected = tuple[list[Any], Exception | None]  # items, and the fault that ended them
_work: Callable[[Any], Any]  # of a process that `map_in_order` started


def default_processes() -> int:
    """Return the number of CPUs that this process may use, at most MAX_PROCESSES."""
    has_affinity = hasattr(os, "sched_getaffinity")  # missing on macOS
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(cpus, MAX_PROCESSES)


def map_in_order(
    work: Callable[[Item], Result], items: Iterator[Item], *, processes: int
) -> Iterator[Result]:
    """Yield `work(item)` of each item; `processes` share the work unless the items are few.

    Raise the first error of `items` or of `work`, and UserError if a process is killed.
    """
    if processes == 1:
        yield from map(work, items)
        return
    first, fault = _collect(islice(items, FEW_ITEMS))
    if len(first) == FEW_ITEMS:
        yield from _map_in_processes(work, chain(first, items), processes)
        return
    yield from map(work, first)
    if fault is not None:
        raise fault


def _collect(items: Iterable[Any]) -> Collected:
    collected = []
    try:
        collected.extend(items)
    except Exception as fault:  # noqa: BLE001 - it is raised in its turn
        return collected, fault
    return collected, None


def _map_in_processes(
    work: Callable[[Item], Result], items: Iterator[Item], processes: int
) -> Iterator[Result]:
    # A fork would copy the locks of other threads as they are, and whatever memory is written.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(work,))
    pending: deque[tuple[Future[Collected], Exception | None]] = deque()
    try:
        for batch, fault in _read_batches(items):
            pending.append((pool.submit(_work_on, batch), fault))
            if len(pending) > BATCHES_AHEAD * processes:
                yield from _wait(*pending.popleft())
        while pending:
            yield from _wait(*pending.popleft())
    except BrokenProcessPool as error:
        raise UserError(
            f"data.processes: must be as many as memory allows, got {processes}, of which one was "
            "killed; lower it"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _read_batches(items: Iterator[Any]) -> Iterator[Collected]:
    """Yield batches of the items; a fault of `items` comes with the batch before it."""
    fault = None
    while fault is None and (collected := _collect(islice(items, BATCH_ITEMS))) != ([], None):
        fault = collected[1]
        yield collected


def _wait(future: Future[Collected], fault_after: Exception | None) -> Iterator[Any]:
    """Yield the results of a batch; raise the fault that ended it or came after it."""
    results, fault = future.result()
    yield from results
    if first_fault := fault or fault_after:
        raise first_fault


def _start(work: Callable[[Any], Any]) -> None:
    """Prepare a process that was started for `work`."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # these processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent answers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit once the parent has: a pool leaves its processes waiting if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work_on(batch: list[Any]) -> Collected:
    results, fault = _collect(map(_work, batch))
    if fault is not None:  # pickling drops the traceback
        fault.add_note("".join(traceback.format_exception(fault)))
    return results, fault
