"""A feature store as a run's data: its documents and the target's features of them."""

from data.config import DataConf, DataSource
from data.features.reader import FeatureStore
from models.drafts.base import Draft
from models.target.target import Target
from train.distributed.parallel import Parallel


def open_store(
    data: DataConf, target: Target, draft: Draft, parallel: Parallel
) -> FeatureStore | None:
    """Open the run's store, if it has one; one process compares the checksums for all."""
    if data.source is not DataSource.captured:
        return None
    with parallel.main_first():
        return FeatureStore.open(
            str(data.path), target_hash=target.fingerprint,
            tokenizer_hash=target.tokenizer_fingerprint, needs=draft.needs,
            dtype=target.device.dtype, checksums=data.checksums and parallel.is_main,
        )  # fmt: skip
