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
from train.distributed.deal import deal_rows
from train.distributed.parallel import Parallel
from train.rows.features import TargetFeatures
from train.rows.on_policy import OnPolicy

Item = TypeVar("Item")
Visit = tuple[int, bool]  # the number of a row, and whether it is used as the draft has written it


@dataclass(kw_only=True)
class MicroBatch:
    """Rows of one forward and backward pass of a process."""

    batch: Batch
    target_output: TargetOutput | None  # on the host; None: computed in the step
    target_passes: list[Batch | None]  # that a tensor group runs together, in this order; None is that of `batch`
    extras: Extras  # on the host
    term_weights: Tensor | None

    def to(self, device: torch.device) -> "MicroBatch":
        """Move all but what is large, which the step moves when it needs it."""
        term_weights = None if self.term_weights is None else self.term_weights.to(device)
        passes = [other and other.to(device) for other in self.target_passes]
        return replace(self, batch=self.batch.to(device), target_passes=passes, term_weights=term_weights)


class MicroBatchBuilder:
    """Builder of this process's share of each step, on the host."""

    def __init__(self, conf: TrainConf, parallel: Parallel, draft: Draft, features: TargetFeatures):
        self.seed, self.parallel, self.draft, self.features = conf.seed, parallel, draft, features
        # The order is that of whole steps, so how a step is split changes nothing.
        self.order = RowOrder(seed=conf.data.seed, num_rows=len(features.rows), rows_per_step=conf.optim.rows_per_step)
        self.deal = deal_rows(conf, groups=parallel.num_data_ranks, tensor=parallel.conf.tensor_size)
        self.part = parallel.tensor_rank // self.deal.copies
        self.size = conf.optim.micro_batch_rows(self.deal.rows)
        self.on_policy: OnPolicy | None = None
        if conf.data.on_policy.share and (language_model := draft.as_language_model()) is not None:
            self.on_policy = OnPolicy(
                conf=conf.data.on_policy,
                rows=features.rows,
                order=self.order,
                language_model=language_model,
                eos_ids=features.target.eos_ids,
                rank=parallel.data_rank,
                world_size=parallel.num_data_ranks,
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
                    self.on_policy.renew(step, end=steps.stop)
            yield self.build_step(step)

    def build_step(self, step: int) -> list[MicroBatch]:
        """Return this process's micro-batches of a step, of equal sizes."""
        if self.on_policy is None:
            row_numbers = self.order.step_rows(step, self.parallel.data_rank, self.parallel.num_data_ranks)
            visits = [(number, False) for number in row_numbers]
        else:
            visits = self.on_policy.list_visits(step)
        parts = [visits[part :: self.deal.parts] for part in range(self.deal.parts)]
        return [
            self._build_micro_batch(step, [part[first : first + self.size] for part in parts])
            for first in range(0, self.deal.rows, self.size)
        ]

    def _build_micro_batch(self, step: int, parts: list[list[Visit]]) -> MicroBatch:
        """Build the micro-batch of this process's part of the group, with the target's passes of all parts."""
        own = parts[self.part]
        batch, target_output = self._build_batch(own), None
        if not self._needs_pass(own):
            target_output = self.features.look_up([number for number, _ in own])
            if self.parallel.device.reads_pinned_memory:
                target_output = target_output.map_tensors(Tensor.pin_memory)
        generators = [np.random.default_rng([self.seed, step, number]) for number, _ in own]
        return MicroBatch(
            batch=batch,
            target_output=target_output,
            target_passes=[
                None if part is own else self._build_batch(part) for part in parts if self._needs_pass(part)
            ],
            term_weights=self.draft.term_weights(batch),
            extras=self.draft.prepare_batch(batch, step=step, generators=generators),
        )

    def _needs_pass(self, visits: list[Visit]) -> bool:
        """Return whether the step runs the target over these rows.

        Where it gathers weights for a pass, all data ranks run it, though one of them alone has rows of the draft.
        """
        may_be_drafted = self.on_policy is not None and self.features.target.gathers_weights
        return may_be_drafted or any(is_drafted for _, is_drafted in visits) or not self.features.are_kept

    def _build_batch(self, visits: list[Visit]) -> Batch:
        row_numbers, drafted = map(list, zip(*visits, strict=True))
        if self.on_policy is not None and any(drafted):
            return self.on_policy.build_batch(row_numbers, drafted)
        return self.features.rows.batch(row_numbers)


def build_ahead(build: Callable[[int], Item], steps: range) -> Generator[Item]:
    """Yield the input of each step; a thread builds the next one while one is used."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending = deque([thread.submit(build, steps.start)])
        for step in steps:
            if step + 1 in steps:
                pending.append(thread.submit(build, step + 1))
            yield pending.popleft().result()
