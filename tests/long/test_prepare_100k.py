"""100,000 rows of mixed formats and faults, killed on the way, need bounded memory, and every row is counted."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.config import TurnSelection
from data.sources.prepared_rows import parse_prepared_row, read_prepared_rows
from tests.support.data.messy_data import HELD_OUT, ROWS, build
from tests.support.runs.killing import TIMEOUT_S

ROOT = Path(__file__).parents[2]
THINKING = '{"enable_thinking": true}'
MOST_BYTES = 2 * 2**30
MOST_BEYOND_IMPORTS = 2**28  # the rows are 230 MB of JSON


def start_prepare(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "data.prepare", "--config-dir", "conf", "mixture=messy"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def measure_peak_bytes(run: subprocess.Popen) -> int:
    """Wait for a successful end; return the most memory that the process took.

    It is polled, since the peak that `wait4` reports of a process includes the memory of its parent.
    """
    process, most = psutil.Process(run.pid), 0
    while run.poll() is None:
        with suppress(psutil.Error):  # the process may end in between
            most = max(most, process.memory_info().rss)
        time.sleep(0.005)
    assert run.returncode == 0
    return most


def wait_for(run: subprocess.Popen, file: Path) -> int:
    """Wait until the file exists, complete or not; return the memory of the process then."""
    deadline = time.monotonic() + TIMEOUT_S
    while not list(file.parents[1].glob(f"{file.parent.name}/{file.name}")):
        assert run.poll() is None, "the run ended before its moment came"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return psutil.Process(run.pid).memory_info().rss


def kill_process(run: subprocess.Popen) -> None:
    run.kill()
    assert run.wait() == -9


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return the folder, the planted faults, and the memory before the first row and at its peak."""
    folder = tmp_path_factory.mktemp("messy")
    planted = build(folder)
    out = folder / "outputs" / "prepare" / "messy"
    first = start_prepare(folder)
    imports = wait_for(first, out.parent / "*" / "000.arrow")
    wait_for(first, out.parent / "*" / "002.arrow")
    kill_process(first)
    assert not (out / "report.json").exists()
    return out, planted, (imports, measure_peak_bytes(start_prepare(folder)))


def test_preparation_needs_bounded_memory(prepared):
    _, _, (imports, peak) = prepared
    assert peak < MOST_BYTES
    assert peak - imports < MOST_BEYOND_IMPORTS


def test_every_row_is_written_or_counted_under_its_reason(prepared):
    out, planted, _ = prepared
    report = json.loads((out / "report.json").read_text())
    assert report["read"] == sum(ROWS.values()) == 100_000
    for name, rows in ROWS.items():
        source = report["sources"][name]
        assert source["dropped"] == planted[name], name
        assert source["read"] == rows
        assert source["train"] + source["held_out"] == rows - planted[name].total()
    dropped = sum(planted.values(), Counter())
    assert report["dropped_by_reason"] == dropped
    assert report["read"] == report["train"] + report["held_out"] + dropped.total()
    assert report["excluded_prompts"] == {str(out.parents[2] / "prompts.jsonl"): len(HELD_OUT)}


def test_the_files_agree_with_the_report(prepared):
    out, _, _ = prepared
    report = json.loads((out / "report.json").read_text())
    names = ["id", "source", "license", "template"]
    tables = {
        split: pq.read_table(next(out.glob(f"{split}-*.parquet")), columns=names) for split in ("train", "held_out")
    }
    assert {split: len(table) for split, table in tables.items()} == {split: report[split] for split in tables}
    rows = pa.concat_tables(tables.values()).to_pydict()
    assert len(set(rows["id"])) == len(rows["id"])  # every id is its own
    written = Counter(zip(rows["source"], rows["license"], strict=True))
    assert written == {
        (name, f"{name} license"): source["train"] + source["held_out"] for name, source in report["sources"].items()
    }
    modes = Counter(rows["template"])  # of chat alone, half of the rows each
    assert abs(modes[THINKING] - modes[THINKING.replace("true", "false")]) < 1000
    assert modes[THINKING] > 10_000
    sample = islice(read_prepared_rows(out), 500)
    assert all(list(parse_prepared_row(row, TurnSelection.all)) for row in sample)
    prompts = [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]
    assert {prompt["id"] for prompt in prompts} == set(tables["held_out"]["id"].to_pylist())


def test_no_unfinished_file_is_left(prepared):
    out, _, _ = prepared
    assert {file.name for file in out.iterdir()} == set(
        (
            "config.yaml lock lock-00000 report.json report.md held_out.jsonl train-00000-of-00001.parquet "
            "held_out-00000-of-00001.parquet"
        ).split()
    )
