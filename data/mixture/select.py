"""The rows that are taken, out of all candidates on disk, as memory-mapped data sets."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from data.mixture.config import MixtureConf, choose
from data.mixture.report import HELD_OUT, TRAIN
from data.sources.files import BATCH
from data.sources.prepared_rows import Row, row_of


def chosen_rows(
    files: list[Path], mixture: MixtureConf
) -> tuple[dict[str, Dataset], dict[str, Counter[str]]]:
    """Those of each split, in their order; and by source how many were left, by reason."""
    sources = [Dataset.from_file(str(file)) for file in files]
    table = concatenate_datasets(sources)
    signs, held_out = (table.data.column(name).to_numpy() for name in ("sign", "held_out"))
    numbers = np.repeat(np.arange(len(sources)), [len(source) for source in sources])
    chosen = choose(signs, numbers, mixture)
    held = held_out[chosen.rows].astype(bool)
    splits = {HELD_OUT: chosen.rows[held], TRAIN: chosen.rows[~held]}
    return {split: table.select(rows) for split, rows in splits.items()}, chosen.dropped


def rows_of(table: Any) -> Iterator[Row]:
    """Rows of a data set, a batch of them in memory."""
    for batch in table.with_format("arrow").iter(batch_size=BATCH):
        yield from map(row_of, batch.to_pylist())
