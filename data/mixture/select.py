"""Selection of a mixture's rows among all candidates on disk, as memory-mapped datasets."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from data.mixture.config import MixtureConf, select_rows
from data.mixture.report import HELD_OUT, TRAIN
from data.sources.files import TABLE_BATCH_ROWS
from data.sources.prepared_rows import PreparedRow, row_from_columns


def select_splits(
    files: list[Path], mixture: MixtureConf
) -> tuple[dict[str, Dataset], dict[str, Counter[str]]]:
    """Return the selected rows of each split, and the drop counts by source and reason."""
    sources = [Dataset.from_file(str(file)) for file in files]
    table = concatenate_datasets(sources)
    hashes, held_out = (table.data.column(name).to_numpy() for name in ("sign", "held_out"))
    source = np.repeat(np.arange(len(sources)), [len(source) for source in sources])
    selected = select_rows(hashes, source, mixture)
    is_held_out = held_out[selected.rows].astype(bool)
    splits = {HELD_OUT: selected.rows[is_held_out], TRAIN: selected.rows[~is_held_out]}
    return {split: table.select(rows) for split, rows in splits.items()}, selected.dropped


def iter_table_rows(table: Any) -> Iterator[PreparedRow]:
    """Yield the rows of a dataset, with one batch in memory at a time."""
    for batch in table.with_format("arrow").iter(batch_size=TABLE_BATCH_ROWS):
        yield from map(row_from_columns, batch.to_pylist())
