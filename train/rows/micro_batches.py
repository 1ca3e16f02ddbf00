"""Micro-batches of each step: this process's rows, built by a thread one step ahead."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.packing.sampler import RowOrder
from models.drafts.base import Batch, Draft, Extras
from models.target.language_model import TargetOutput
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.rows.features import TargetFeatures
from train.rows.on_policy import OnPolicy

Item = TypeVar("Item")


@dataclass(kw_only=True)
class MicroBatch:
    """Rows of one forward and backward pass of a process."""

    batch: Batch
    target_output: TargetOutput | None  # on the host; None: computed in the step
    extras: Extras
    term_weights: Tensor | None

    def to(self, device: torch.device) -> "MicroBatch":
        """Move all but `target_output`, which is large: the step moves it when it needs it."""
        return MicroBatch(
            batch=self.batch.to(device),
            target_output=self.target_output,
            extras={name: extra.to(device) for name, extra in self.extras.items()},
            term_weights=None if self.term_weights is None else self.term_weights.to(device),
        )


class MicroBatchBuilder:
    """Builder of this process's share of each step, on the host."""

    def __init__(self, conf: TrainConf, parallel: Parallel, draft: Draft, features: TargetFeatures):
        self.seed, self.parallel, self.draft, self.features = conf.seed, parallel, draft, features
        # The order is that of whole steps, so how a step is split changes nothing.
        self.order = RowOrder(
            seed=conf.data.seed, num_rows=len(features.rows), batch_size=conf.optim.rows_per_step
        )
        self.size = conf.optim.micro_batch_size(conf.optim.rows_per_step // parallel.num_data_ranks)
        language_model = draft.as_language_model() if conf.data.on_policy.share else None
        self.on_policy = None if language_model is None else OnPolicy(
            conf=conf.data.on_policy, rows=features.rows, order=self.order,
            language_model=language_model, rank=parallel.data_rank,
            world_size=parallel.num_data_ranks,
        )  # fmt: skip

    def build_step(self, step: int) -> list[MicroBatch]:
        """Build the micro-batches of a step, of equal sizes."""
        rows = self.order.batch_rows(step, self.parallel.data_rank, self.parallel.num_data_ranks)
        drafted = self._select_draft_rows(step, len(rows))
        return [
            self._build_micro_batch(
                step, rows[first : first + self.size], drafted[first : first + self.size]
            )
            for first in range(0, len(rows), self.size)
        ]

    def _build_micro_batch(self, step: int, rows: list[int], drafted: list[bool]) -> MicroBatch:
        if self.on_policy is not None and any(drafted):
            batch, target_output = self.on_policy.build_batch(rows, drafted), None
        else:
            batch, target_output = self.features.rows.batch(rows), self.features.lookup(rows)
        generators = [np.random.default_rng([self.seed, step, row]) for row in rows]
        return MicroBatch(
            batch=batch, target_output=target_output, term_weights=self.draft.term_weights(batch),
            extras=self.draft.prepare_batch(batch, step=step, generators=generators),
        )  # fmt: skip

    def _select_draft_rows(self, step: int, count: int) -> list[bool]:
        """Flag those of this process's rows that the draft writes itself."""
        if self.on_policy is None:
            return [False] * count
        if step % self.on_policy.conf.every == 0:
            with self.parallel.full_weights(self.draft):
                self.on_policy.renew(step)
        return self.on_policy.select_rows(step)


class Prefetcher(Generic[Item]):
    """Builder of each step's input by `make`: one step `early`, or when it is taken.

    `wait_seconds`: how long the run has waited for it since this was last set to 0.
    """

    def __init__(self, make: Callable[[int], Item], *, steps: int, early: bool):
        self.make, self.steps, self.early = make, steps, early
        self.wait_seconds = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._next: Future[Item] | None = None

    def take(self, step: int) -> Item:
        """Return the input of this step; raise what `make` raised."""
        began = time.perf_counter()
        item = self._next.result() if self._next else self.make(step)
        self.wait_seconds += time.perf_counter() - began
        has_next = self.early and step + 1 < self.steps
        self._next = self._thread.submit(self.make, step + 1) if has_next else None
        return item

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
