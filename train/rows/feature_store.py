"""A feature store as a run's data: its documents, and what the target computed on them."""

from data.config import DataConf, Source
from data.features.reader import Store
from models.drafts.base import Draft
from models.target.target import Target
from train.distributed.parallel import Parallel


def opened(data: DataConf, target: Target, draft: Draft, parallel: Parallel) -> Store | None:
    """The run's store, where it has one. One process compares the checksums for all."""
    if data.source is not Source.captured:
        return None
    with parallel.main_first():
        return Store.open(
            str(data.path), target_hash=target.fingerprint,
            tokenizer_hash=target.tokenizer_fingerprint, needs=draft.needs,
            dtype=target.device.dtype, checksums=data.checksums and parallel.main,
        )  # fmt: skip
