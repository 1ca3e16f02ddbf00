"""What a step trains on is the same after a resume, for 1, 2 and 4 processes, from any folder."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from data.config import DataConf, DataSource
from data.document_cache import read_documents
from data.packing.documents import Packed
from data.packing.pack import pack_documents
from data.packing.sampler import RowOrder
from data.sources import prepared_rows
from data.sources.prepared_rows import PreparedRow, RecordedDocument
from tests.support.tiny import tiny_tokenizer

SHARDS, ROWS, STEPS = 3, 20, 12
CATEGORIES = ["code", "chat", "math"]


@pytest.fixture
def folder(tmp_path):
    """A mixture of three categories, written by several workers."""
    numbers = np.random.default_rng(0)
    for shard in range(SHARDS):
        rows = []
        for row in range(ROWS):
            ids = numbers.integers(1, 60, numbers.integers(5, 30)).tolist()
            rows.append(
                PreparedRow(
                    id=f"{shard}-{row}", source="made", category=CATEGORIES[row % 3],
                    documents=[RecordedDocument(ids=ids, spans=[[3, len(ids)]])],
                )
            )  # fmt: skip
        file = tmp_path / f"train-{shard:05d}-of-{SHARDS:05d}.parquet"
        prepared_rows.write_prepared_rows(file, rows, dict)
    return tmp_path


def rows_of(folder) -> Packed:
    """As a process that has just started reads and packs them."""
    conf = DataConf(source=DataSource.prepared, path=str(folder), row_length=64)
    return pack_documents(read_documents(conf, tiny_tokenizer()), conf.row_length)[0]


def visited(folder, *, rank: int = 0, world: int = 1, steps=range(STEPS)) -> list[torch.Tensor]:
    """Token ids of this process's rows, step by step."""
    rows = rows_of(folder)
    order = RowOrder(num_rows=len(rows), rows_per_step=8, seed=3)
    return [rows.batch(order.batch_rows(step, rank, world)).input_ids for step in steps]


def test_a_mixture_is_read_whole_and_in_the_same_order(folder):
    first, again = rows_of(folder), rows_of(folder)
    assert len(first.documents) == SHARDS * ROWS
    assert first.documents.ids.tobytes() == again.documents.ids.tobytes()
    assert np.array_equal(first.table, again.table)
    named = [first.documents.categories[code] for code in first.documents.category]
    assert Counter(named) == {"code": 21, "chat": 21, "math": 18}


def test_a_continued_run_goes_on_as_it_would_have(folder):
    whole = visited(folder)
    rest = visited(folder, steps=range(5, STEPS))
    assert all(map(torch.equal, whole[5:], rest))


@pytest.mark.parametrize("world", [2, 4])
def test_processes_together_take_the_step_of_one(folder, world):
    whole = visited(folder)
    shares = [visited(folder, rank=rank, world=world) for rank in range(world)]
    for step, wanted in enumerate(whole):
        dealt = chain(*zip(*(share[step] for share in shares), strict=True))
        assert torch.equal(torch.stack(list(dealt)), wanted)
