"""The licenses of training data, for stores and model cards."""

from collections import Counter
from pathlib import Path

from data.config import DataConf, DataSource
from data.sources.prepared_rows import read_prepared_metadata

NOT_RECORDED = "not recorded"
KNOWN_LICENSES = {"HuggingFaceH4/ultrachat_200k": "MIT"}  # of the data set that the recipes name


def describe_licenses(data: DataConf) -> str:
    """Return `data.license`, or those that data.prepare recorded with its rows, or that of a known data set, or ""."""
    counts: Counter[str] = Counter()
    if data.source is DataSource.prepared and data.path is not None:
        for file in sorted(Path(data.path).glob("train-*.parquet")):
            for licenses in read_prepared_metadata(file)["licenses"].values():
                counts.update(licenses)
    recorded = ", ".join(f"{name or NOT_RECORDED} ({count:,} rows)" for name, count in counts.items())
    return data.license or recorded or KNOWN_LICENSES.get(data.path or "", "")
