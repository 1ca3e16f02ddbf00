"""Read the records of an offline W&B run: its file is a log in LevelDB's format."""

import json
from collections.abc import Iterator
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER, BLOCK, CHUNK_HEADER = 7, 2**15, 7  # bytes; a chunk's: 4 of a checksum, 2 of its size
FULL, LAST = 1, 4  # kinds of chunks that end a record


def read_records(folder: Path) -> list[Record]:
    """Return the records of all offline runs below `folder/wandb`, the oldest run's first."""
    wandb.teardown()  # ends the process that writes them, which may be behind
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    return [Record.FromString(data) for file in files for data in read_log(file.read_bytes())]


def read_log(log: bytes) -> Iterator[bytes]:
    """Join the chunks of each record; none begins in the last bytes of a block."""
    start, record = FILE_HEADER, b""
    while start + CHUNK_HEADER < len(log):
        if BLOCK - start % BLOCK < CHUNK_HEADER:
            start += BLOCK - start % BLOCK
        size, kind = int.from_bytes(log[start + 4 : start + 6], "little"), log[start + 6]
        record += log[start + CHUNK_HEADER : start + CHUNK_HEADER + size]
        start += CHUNK_HEADER + size
        if kind in (FULL, LAST):
            yield record
            record = b""


def logged(folder: Path) -> list[dict]:
    """Return the logged values, a dictionary for each call."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for record in read_records(folder)
        if (items := record.history.item)
    ]


def run_ids(folder: Path) -> list[tuple[str, str, str]]:
    """Return the id, project and name of each run."""
    runs = [record.run for record in read_records(folder) if record.HasField("run")]
    return [(run.run_id, run.project, run.display_name) for run in runs]


def read_axes(folder: Path) -> dict[str, str]:
    """Return the axis of each metric that defines its own."""
    metrics = [record.metric for record in read_records(folder) if record.HasField("metric")]
    return {metric.glob_name or metric.name: metric.step_metric for metric in metrics if metric.step_metric}
