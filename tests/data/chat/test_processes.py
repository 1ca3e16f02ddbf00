"""Several processes yield the documents, counts and faults of a single process."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import psutil
import pytest

from data.chat import processes
from data.chat.processes import BATCH_ITEMS, FEW_ITEMS, default_processes, map_in_order
from data.config import DataConf, DataSource
from data.document_cache import FOLDER, read_cached_documents, read_documents
from models.io.errors import UserError
from models.io.files import PARTIAL_SUFFIX
from tests.data.test_document_cache import MARKERS, SIZE, TEMPLATE, assert_equal
from tests.support.models.tiny import byte_tokenizer
from tests.support.runs.signaled import send_at_rename

WAIT_S = 300
ROWS = FEW_ITEMS + 10 * BATCH_ITEMS
STRICT = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
UNKNOWN_TOKEN = {"ids": [1, SIZE], "answer": [False, True]}
NOT_JSON = "{"


def stop_at_three(number: int) -> int:
    return next(iter([number] if number != 3 else []))


def test_items_behind_one_that_raises_are_not_lost_without_a_word():
    """`next` of nothing in the work would end a loop of `map`."""
    with pytest.raises(RuntimeError):
        list(map_in_order(stop_at_three, iter(range(5)), processes=2))


def build_tokenizer():
    return byte_tokenizer(MARKERS, template=STRICT, eos_token="<end>")


def build_chat_row(*texts: str, category: str = "") -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, "category": category}


def build_row(number: int) -> dict:
    """Return a row; every fifth cannot be used, for one of three reasons that are equally frequent."""
    if number % 5:
        return build_chat_row(f"Is {number} even?", str(number % 2 == 0), category="abc"[number % 3])
    return (build_chat_row("no", "yes"), build_chat_row("Hello"), {"nothing": number})[number // 5 % 3]


def write_rows(folder, *, count: int = ROWS, **replaced: dict | str) -> DataConf:
    """Write rows to a file, with those of the arguments `row_NUMBER` in place of the usual rows."""
    rows = [replaced.get(f"row_{number}", build_row(number)) for number in range(count)]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return DataConf(source=DataSource.jsonl, path=str(file))


def read_fault(conf: DataConf, count: int) -> str:
    with pytest.raises(UserError) as caught:
        read_documents(replace(conf, processes=count), build_tokenizer(), SIZE)
    return str(caught.value)


@pytest.mark.system
def test_documents_and_counts_are_those_of_a_single_process(tmp_path):
    conf = write_rows(tmp_path)
    single, parallel = (read_documents(replace(conf, processes=n), build_tokenizer(), SIZE) for n in (1, 3))
    assert_equal(single, parallel)
    assert len(single.skipped) == 3
    assert len(single) + sum(single.skipped.values()) == ROWS


@pytest.mark.system
@pytest.mark.parametrize("fault", [{f"row_{ROWS - 40}": UNKNOWN_TOKEN}, {f"row_{ROWS - 1}": NOT_JSON}])
def test_a_fault_is_that_of_a_single_process(tmp_path, fault):
    conf = write_rows(tmp_path, **fault)
    assert read_fault(conf, 3) == read_fault(conf, 1)


def test_the_default_is_a_process_for_each_usable_cpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert default_processes() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)), raising=False)
    assert default_processes() == processes.MAX_PROCESSES


def kill_at(last: int, number: int) -> int:
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.system
def test_a_killed_process_is_reported_in_one_line():
    results = map_in_order(partial(kill_at, 700), iter(range(ROWS)), processes=2)
    with pytest.raises(UserError, match=r"^data\.processes: must .*, got 2, of which [^\n]*$"):
        list(results)


def read_and_be_killed(conf: DataConf, output_dir: str) -> None:
    """Tokenize, and be killed before the folder gets its final name."""
    send_at_rename(signal.SIGKILL, f"*/{FOLDER}/*")
    read_cached_documents(conf, build_tokenizer(), SIZE, output_dir)


def wait_at(last: int, number: int) -> int:
    if number == last:
        os.write(1, b"waits\n")
        signal.pause()
    return number


WAIT_IN_TWO_PROCESSES = (
    "from tests.data.chat.test_processes import *; "
    f"list(map_in_order(partial(wait_at, 100), iter(range({2 * FEW_ITEMS})), processes=2))"
)


@pytest.mark.system
def test_processes_end_with_a_killed_parent():
    code = WAIT_IN_TWO_PROCESSES
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        assert main.stdout.readline() == "waits\n"
        children = psutil.Process(main.pid).children(recursive=True)
        assert len(children) >= 2
        main.kill()
        main.wait(timeout=WAIT_S)
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []


@pytest.mark.system
def test_after_a_kill_no_incomplete_folder_has_the_final_name(tmp_path):
    conf = replace(write_rows(tmp_path), processes=2)
    context = multiprocessing.get_context("spawn")
    first = context.Process(target=read_and_be_killed, args=(conf, str(tmp_path)))
    first.start()
    first.join()
    assert first.exitcode == -signal.SIGKILL
    folders = [path.suffix for path in (tmp_path / FOLDER).iterdir() if path.is_dir()]
    assert folders == [PARTIAL_SUFFIX]
    second = read_cached_documents(conf, build_tokenizer(), SIZE, str(tmp_path))
    assert_equal(second, read_documents(replace(conf, processes=1), build_tokenizer(), SIZE))
