"""Selection of a mixture's rows among all candidates on disk, as memory-mapped datasets."""

from collections import Counter
from pathlib import Path

import numpy as np
from datasets import Dataset, concatenate_datasets
from jaxtyping import Int, UInt64

from data.prepare_config import MixtureConf
from data.sources.prepared_rows import HELD_OUT, TRAIN
from models.io.errors import UserError


def select_splits(files: list[Path], mixture: MixtureConf) -> tuple[dict[str, Dataset], dict[str, Counter[str]]]:
    """Return the selected rows of each split, and the drop counts by source and reason."""
    sources = [Dataset.from_file(str(file)) for file in files]
    table = concatenate_datasets(sources)
    hashes, held_out = (table.data.column(name).to_numpy() for name in ("sign", "held_out"))
    source = np.repeat(np.arange(len(sources)), [len(source) for source in sources])
    rows, dropped = select_rows(hashes, source, mixture)
    is_held_out = held_out[rows].astype(bool)
    return {HELD_OUT: table.select(rows[is_held_out]), TRAIN: table.select(rows[~is_held_out])}, dropped


def select_rows(
    hashes: UInt64[np.ndarray, " rows"], source: Int[np.ndarray, " rows"], conf: MixtureConf
) -> tuple[Int[np.ndarray, " selected"], dict[str, Counter[str]]]:
    """Drop duplicate rows, by the hashes of their questions, and take each source's share.

    Return the selected rows' indices in the order in which they are written, and the drop counts by source and reason.
    """
    # the first row of each hash; sorting by hash shuffles the rows reproducibly
    _, first_rows = np.unique(hashes, return_index=True)
    unique_rows = {name: first_rows[source[first_rows] == number] for number, name in enumerate(conf.sources)}
    quotas = compute_quotas({name: len(rows) for name, rows in unique_rows.items()}, conf)
    selected = np.concatenate([rows[: quotas[name]] for name, rows in unique_rows.items()])
    counts = np.bincount(source, minlength=len(unique_rows)).tolist()
    dropped = {
        name: +Counter(  # the unary plus removes zero counts
            {"a duplicate": count - len(rows), "beyond its share": len(rows) - quotas[name]}
        )
        for (name, rows), count in zip(unique_rows.items(), counts, strict=True)
    }
    return first_rows[np.isin(first_rows, selected)], dropped


def compute_quotas(available: dict[str, int], conf: MixtureConf) -> dict[str, int]:
    """Return the number of rows to take from each source; raise UserError for one with too few for its share."""
    shares = {name: source.share for name, source in conf.sources.items() if source.share}
    if not shares:
        return available
    if empty := [name for name in shares if not available[name]]:
        raise UserError(
            f"mixture.sources.{empty[0]}: must have rows that no earlier source has, got "
            "only duplicates; remove the source"
        )
    total = sum(shares.values())
    # 2 * (0.7 + 0.2 + 0.1) / 0.2 is a little less than 10.
    max_rows = int(min(available[name] * total / share for name, share in shares.items()) * (1 + 1e-12))
    while any(n > available[name] for name, n in _split_rows(shares, max_rows).items()):
        max_rows -= 1  # rounding up a fraction of a row exceeded what a source has
    rows = max_rows if conf.rows is None else conf.rows
    quotas = _split_rows(shares, rows)
    if short := [name for name in shares if quotas[name] > available[name]]:
        name, *_ = short
        raise UserError(
            f"mixture.rows: {name} must give {quotas[name]:,} of {rows:,} rows, got {available[name]:,} that can be "
            f"used; set mixture.rows={max_rows} or null, or change shares"
        )
    return quotas


def _split_rows(shares: dict[str, float], rows: int) -> dict[str, int]:
    """Split `rows` by the shares into whole rows, each within a row of its exact share."""
    ends = np.cumsum(list(shares.values()))
    quotas = np.diff(np.rint(ends * (rows / ends[-1])).astype(int), prepend=0)
    return dict(zip(shares, quotas.tolist(), strict=True))
