"""Do the same work on many items in several processes, and yield the results in order."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from models.io.errors import UserError

FEW_ITEMS = 1000  # fewer are done before other processes have started
BATCH_ITEMS = 32  # that a process takes at a time; each may be megabytes
BATCHES_AHEAD = 16  # for each process; no more items are in memory at a time
MAX_PROCESSES = 16  # more would wait for this one, which reads the items and collects the results
Item = TypeVar("Item")
Result = TypeVar("Result")
_work: Callable[[Any], Any]  # of a process that `map_in_order` started


def default_processes() -> int:
    """Return the number of CPUs that this process may use, at most MAX_PROCESSES."""
    has_affinity = hasattr(os, "sched_getaffinity")  # missing on macOS
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(cpus, MAX_PROCESSES)


def map_in_order(work: Callable[[Item], Result], items: Iterator[Item], *, processes: int) -> Iterator[Result]:
    """Yield `work(item)` of each item; `processes` share the work unless the items are few.

    Raises an error of `items` or of `work` as it is, and UserError if a process is killed.
    """
    first = list(islice(items, FEW_ITEMS)) if processes > 1 else []
    items = chain(first, items)
    if len(first) < FEW_ITEMS:
        for item in items:  # `yield from map(...)` would take a StopIteration of `work` for the end of the items
            yield work(item)
        return
    # A fork would copy the locks of other threads as they are, and whatever memory is written.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(processes, context, _start, (work,)) as pool:
            while batch := list(islice(items, processes * BATCHES_AHEAD * BATCH_ITEMS)):
                yield from pool.map(_run, batch, chunksize=BATCH_ITEMS)
    except BrokenProcessPool as error:
        raise UserError(
            f"data.processes: must be as many as memory allows, got {processes}, of which one was killed; lower it"
        ) from error


def _start(work: Callable[[Any], Any]) -> None:
    """Prepare a process that was started for `work`."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # these processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the parent answers
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    """Exit once the parent has: a pool, for one, leaves its processes waiting if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(item: Any) -> Any:
    return _work(item)
