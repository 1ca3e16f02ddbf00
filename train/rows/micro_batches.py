"""Micro-batches of each step: this process's rows, built by a thread one step ahead."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from data.packing.sampler import RowOrder
from models.batch import Batch
from models.drafts.base import Draft, Extras
from models.parallel.dtensor import full_params
from models.targets.language_model import TargetOutput
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.rows.features import TargetFeatures
from train.rows.on_policy import OnPolicy

Item = TypeVar("Item")


@dataclass(kw_only=True)
class MicroBatch:
    """Rows of one forward and backward pass of a process."""

    batch: Batch
    target_output: TargetOutput | None  # on the host; None: computed in the step
    extras: Extras  # on the host
    term_weights: Tensor | None

    def to(self, device: torch.device) -> "MicroBatch":
        """Move all but what is large, which the step moves when it needs it."""
        term_weights = None if self.term_weights is None else self.term_weights.to(device)
        return replace(self, batch=self.batch.to(device), term_weights=term_weights)


class MicroBatchBuilder:
    """Builder of this process's share of each step, on the host."""

    def __init__(self, conf: TrainConf, parallel: Parallel, draft: Draft, features: TargetFeatures):
        self.seed, self.parallel, self.draft, self.features = conf.seed, parallel, draft, features
        # The order is that of whole steps, so how a step is split changes nothing.
        self.order = RowOrder(seed=conf.data.seed, num_rows=len(features.rows), rows_per_step=conf.optim.rows_per_step)
        self.size = conf.optim.micro_batch_rows(conf.optim.rows_per_step // parallel.num_data_ranks)
        language_model = draft.as_language_model() if conf.data.on_policy.share else None
        self.on_policy = (
            None
            if language_model is None
            else OnPolicy(
                conf=conf.data.on_policy,
                rows=features.rows,
                order=self.order,
                language_model=language_model,
                rank=parallel.data_rank,
                world_size=parallel.num_data_ranks,
            )
        )

    def iterate_steps(self, steps: range) -> Generator[list[MicroBatch]]:
        """Yield the micro-batches of each step, built while the step before is taken.

        On-policy rows depend on the weights, so with them a step is built when it is asked for. The
        draft writes them at the first step and at every renewal.
        """
        if self.on_policy is None:
            yield from build_ahead(self.build_step, steps)
            return
        for step in steps:
            if step == steps.start or step % self.on_policy.conf.interval == 0:
                with full_params(self.draft):
                    self.on_policy.renew(step)
            yield self.build_step(step)

    def build_step(self, step: int) -> list[MicroBatch]:
        """Return this process's micro-batches of a step, of equal sizes."""
        row_numbers = self.order.step_rows(step, self.parallel.data_rank, self.parallel.num_data_ranks)
        drafted = [False] * len(row_numbers)  # the rows to use as the draft has written them
        if self.on_policy is not None:
            drafted = self.on_policy.select_rows(step)
        return [
            self._build_micro_batch(step, row_numbers[first : first + self.size], drafted[first : first + self.size])
            for first in range(0, len(row_numbers), self.size)
        ]

    def _build_micro_batch(self, step: int, row_numbers: list[int], drafted: list[bool]) -> MicroBatch:
        if self.on_policy is not None and any(drafted):
            batch, target_output = self.on_policy.build_batch(row_numbers, drafted), None
        else:
            batch = self.features.rows.batch(row_numbers)
            target_output = self.features.look_up(row_numbers)
            if target_output is not None and self.parallel.device.reads_pinned_memory:
                target_output = target_output.map_tensors(Tensor.pin_memory)
        generators = [np.random.default_rng([self.seed, step, number]) for number in row_numbers]
        return MicroBatch(
            batch=batch,
            target_output=target_output,
            term_weights=self.draft.term_weights(batch),
            extras=self.draft.prepare_batch(batch, step=step, generators=generators),
        )


def build_ahead(build: Callable[[int], Item], steps: range) -> Generator[Item]:
    """Yield the input of each step; a thread builds the next one while one is used."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending = deque([thread.submit(build, steps.start)])
        for step in steps:
            if step + 1 in steps:
                pending.append(thread.submit(build, step + 1))
            yield pending.popleft().result()
