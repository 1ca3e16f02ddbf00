"""Several processes tokenize what one does: the same documents, counts and faults."""

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


def tokenizer():
    return byte_tokenizer(MARKERS, template=STRICT, eos_token="<end>")


def chat(*texts: str, category: str = "") -> dict:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, "category": category}


def made_row(number: int) -> dict:
    """Every fifth row cannot be used, for one of three reasons that are equally frequent."""
    if number % 5:
        return chat(f"Is {number} even?", str(number % 2 == 0), category="abc"[number % 3])
    return (chat("no", "yes"), chat("Hello"), {"nothing": number})[number // 5 % 3]


def written(folder, *, count: int = ROWS, **replaced: dict | str) -> DataConf:
    """Rows of a file, with others in the places `row_NUMBER`."""
    rows = [replaced.get(f"row_{number}", made_row(number)) for number in range(count)]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return DataConf(source=DataSource.jsonl, path=str(file))


def read_fault(conf: DataConf, count: int) -> str:
    with pytest.raises(UserError) as caught:
        read_documents(replace(conf, processes=count), tokenizer(), SIZE)
    return str(caught.value)


@pytest.mark.system
def test_documents_and_counts_are_those_of_one_process(tmp_path):
    conf = written(tmp_path)
    one, three = (read_documents(replace(conf, processes=n), tokenizer(), SIZE) for n in (1, 3))
    assert_equal(one, three)
    assert len(one.skipped) == 3
    assert len(one) + sum(one.skipped.values()) == ROWS


@pytest.mark.system
@pytest.mark.parametrize("fault", [{f"row_{ROWS - 40}": UNKNOWN_TOKEN}, {f"row_{ROWS - 1}": NOT_JSON}])
def test_a_fault_is_that_of_one_process(tmp_path, fault):
    conf = written(tmp_path, **fault)
    assert read_fault(conf, 3) == read_fault(conf, 1)


def test_each_cpu_that_this_process_may_use_takes_part(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert default_processes() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)), raising=False)
    assert default_processes() == processes.MAX_PROCESSES


def end_at(last: int, number: int) -> int:
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.system
def test_a_killed_process_is_reported_in_one_line():
    results = map_in_order(partial(end_at, 700), iter(range(ROWS)), processes=2)
    with pytest.raises(UserError, match=r"^data\.processes: must .*, got 2, of which [^\n]*$"):
        list(results)


def read_and_be_killed(conf: DataConf, output_dir: str) -> None:
    """Tokenize as a process that is killed before the folder gets its name."""
    send_at_rename(signal.SIGKILL, f"*/{FOLDER}/*")
    read_cached_documents(conf, tokenizer(), SIZE, output_dir)


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
def test_what_was_being_written_has_not_the_final_name_after_a_kill(tmp_path):
    conf = replace(written(tmp_path), processes=2)
    context = multiprocessing.get_context("spawn")
    first = context.Process(target=read_and_be_killed, args=(conf, str(tmp_path)))
    first.start()
    first.join()
    assert first.exitcode == -signal.SIGKILL
    folders = [path.suffix for path in (tmp_path / FOLDER).iterdir() if path.is_dir()]
    assert folders == [PARTIAL_SUFFIX]
    second = read_cached_documents(conf, tokenizer(), SIZE, str(tmp_path))
    assert_equal(second, read_documents(replace(conf, processes=1), tokenizer(), SIZE))
