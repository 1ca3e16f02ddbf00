"""Micro-batches of each step: this process's rows, built by a thread one step ahead.

With on-policy rows the draft trains on answers that it has written itself (DistillSpec). Every
`interval` steps, it rewrites the rows that it will visit until the next renewal. Which visits use
them, and what is written, depend only on the seed, the step, the row and the weights at the
renewal, not on the process. States are saved at renewals, so a continued run writes the same rows
again.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.config import OnPolicyConf
from data.packing.documents import Packed
from data.packing.sampler import RowOrder
from infer.engine.generate import generate_answers
from models.drafts.base import Batch, Draft, Extras
from models.parallel.dtensor import full_params
from models.speculate.config import SamplingConf
from models.target.language_model import LanguageModel, TargetOutput
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.rows.features import TargetFeatures

Item = TypeVar("Item")
ANSWER_BATCH_SIZE = 128  # prompts that are decoded together
BATCH_FIELDS = ("input_ids", "answer_mask", "document_ids", "positions")  # of rows without context


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
        self.order = RowOrder(
            seed=conf.data.seed,
            num_rows=len(features.rows),
            rows_per_step=conf.optim.rows_per_step,
        )
        self.size = conf.optim.rows_per_pass(conf.optim.rows_per_step // parallel.num_data_ranks)
        language_model = draft.as_language_model() if conf.data.on_policy.share else None
        self.on_policy = None if language_model is None else OnPolicy(
            conf=conf.data.on_policy, rows=features.rows, order=self.order,
            language_model=language_model, rank=parallel.data_rank,
            world_size=parallel.num_data_ranks,
        )  # fmt: skip

    def build_step(self, step: int) -> list[MicroBatch]:
        """Return this process's micro-batches of a step, of equal sizes.

        At a renewal, the draft first writes the on-policy rows.
        """
        row_numbers = self.order.batch_rows(
            step, self.parallel.data_rank, self.parallel.num_data_ranks
        )
        drafted = self._select_draft_rows(step, len(row_numbers))
        return [
            self._build_micro_batch(
                step, row_numbers[first : first + self.size], drafted[first : first + self.size]
            )
            for first in range(0, len(row_numbers), self.size)
        ]

    def _build_micro_batch(
        self, step: int, row_numbers: list[int], drafted: list[bool]
    ) -> MicroBatch:
        if self.on_policy is not None and any(drafted):
            batch, target_output = self.on_policy.build_batch(row_numbers, drafted), None
        else:
            batch = self.features.rows.batch(row_numbers)
            target_output = self.features.look_up(row_numbers)
        generators = [np.random.default_rng([self.seed, step, number]) for number in row_numbers]
        return MicroBatch(
            batch=batch, target_output=target_output, term_weights=self.draft.term_weights(batch),
            extras=self.draft.prepare_batch(batch, step=step, generators=generators),
        )  # fmt: skip

    def _select_draft_rows(self, step: int, count: int) -> list[bool]:
        """Return for each of this process's rows whether to use it as the draft has written it.

        At a renewal, the draft first writes the rows that are used before the next one.
        """
        if self.on_policy is None:
            return [False] * count
        if step % self.on_policy.conf.interval == 0:
            with full_params(self.draft):
                self.on_policy.renew(step)
        return self.on_policy.select_rows(step)


@dataclass(kw_only=True)
class OnPolicy:
    """On-policy rows of one process, as its draft has written them."""

    conf: OnPolicyConf
    rows: Packed
    order: RowOrder
    language_model: LanguageModel  # the draft as a language model
    rank: int = 0
    world_size: int = 1
    written: dict[int, Batch] = field(default_factory=dict)  # by row number

    def select_rows(self, step: int) -> list[bool]:
        """Return for each of this process's visits in a step whether it uses a row of the draft."""
        # Drawn for the whole step, so that they do not depend on the number of processes.
        draws = np.random.default_rng([self.order.seed, 1, step]).random(self.order.rows_per_step)
        return (draws < self.conf.share)[self.rank :: self.world_size].tolist()

    def renew(self, step: int) -> None:
        """Let the draft write the rows that the steps from here to the next renewal use."""
        row_numbers = sorted({
            number
            for later_step in range(step, step + self.conf.interval)
            for number, is_drafted in zip(
                self.order.batch_rows(later_step, self.rank, self.world_size),
                self.select_rows(later_step),
                strict=True,
            )
            if is_drafted
        })  # fmt: skip
        self.written = dict(zip(row_numbers, self._generate_rows(row_numbers, step), strict=True))

    def build_batch(self, row_numbers: list[int], drafted: list[bool]) -> Batch:
        """Build a batch of these rows; flagged rows are those that the draft has written."""
        rows = [
            self.written[number] if is_drafted else self.rows.batch([number])
            for number, is_drafted in zip(row_numbers, drafted, strict=True)
        ]
        return Batch(
            **{name: torch.cat([getattr(row, name) for row in rows]) for name in BATCH_FIELDS}
        )

    def _generate_rows(self, row_numbers: list[int], step: int) -> list[Batch]:
        """Return the rows with the first answer of each document rewritten by the draft.

        What follows in the document, the rest of the old answer and later turns, is dropped.
        """
        rows = {number: self.rows.batch([number]) for number in row_numbers}
        spans = [
            (number, begin, end)
            for number, row in rows.items()
            for begin, end in first_answer_spans(row)
        ]
        prompts = [_read_prompt(rows[number], begin) for number, begin, _ in spans]
        # They key the sampling noise, so they must be the same on any process.
        row_ids = [number * self.rows.length + begin for number, begin, _ in spans]
        answers = generate_answers(
            self.language_model, prompts, max_new_tokens=[end - begin for _, begin, end in spans],
            sampling=SamplingConf(temperature=self.conf.temperature, seed=self.order.seed + step),
            batch=ANSWER_BATCH_SIZE, row_ids=row_ids, slots=self.rows.length,
        )  # fmt: skip
        for index, answer_ids in answers:
            number, begin, end = spans[index]
            row, new_ids = rows[number], answer_ids[: end - begin]
            row.input_ids[0, begin : begin + len(new_ids)] = torch.tensor(new_ids)
            rest = row.document_ids[0] == row.document_ids[0, begin].clone()
            rest[: begin + len(new_ids)] = False
            row.document_ids[0, rest] = -1  # padding
            row.answer_mask[0, rest] = False
        return [*rows.values()]


def _read_prompt(row: Batch, begin: int) -> list[int]:
    """Return the tokens of a document before its answer, which begins at `begin`."""
    inside = row.document_ids[0, :begin] == row.document_ids[0, begin]
    return row.input_ids[0, :begin][inside].tolist()


def first_answer_spans(row: Batch) -> list[tuple[int, int]]:
    """Return [begin, end) of the first answer of each document that has a prompt.

    `row` is a batch of one row.
    """
    spans = []
    for document_id in range(int(row.document_ids.max()) + 1):
        inside = row.document_ids[0] == document_id
        in_answer = row.answer_mask[0] & inside
        begin = int(in_answer.int().argmax())  # the first True
        length = int(in_answer[begin:].int().cumprod(0).sum())  # the run of True from there
        if in_answer.any() and begin > int(inside.int().argmax()):
            spans.append((begin, begin + length))
    return spans


class Prefetcher(Generic[Item]):
    """Builder of each step's input by `make`: one step `early`, or when it is taken.

    `wait_seconds`: how long `take` has waited for inputs since this was last set to 0, by `clock`.
    """

    def __init__(
        self, make: Callable[[int], Item], *, steps: int, early: bool,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        self.make, self.steps, self.early, self.clock = make, steps, early, clock
        self.wait_seconds = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")
        self._next: Future[Item] | None = None

    def take(self, step: int) -> Item:
        """Return the input of this step, and start on the next one if `early`.

        Raise what `make` raised.
        """
        began = self.clock()
        item = self._next.result() if self._next else self.make(step)
        self.wait_seconds += self.clock() - began
        has_next = self.early and step + 1 < self.steps
        self._next = self._thread.submit(self.make, step + 1) if has_next else None
        return item

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
