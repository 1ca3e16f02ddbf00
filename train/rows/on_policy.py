"""Rows whose answers the draft has written itself (DistillSpec): on-policy training data.

Every `interval` steps the draft rewrites the rows that it will visit until the next renewal. These depend only on the
seed, the step, the row and the weights then; states are saved at renewals, so a continued run writes the same again.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from data.config import OnPolicyConf
from data.packing.documents import Packed
from data.packing.sampler import RowOrder
from infer.engine.answers import generate_answers
from models.batch import Batch
from models.targets.language_model import LanguageModel
from models.trees.sampling_config import SamplingConf

ANSWER_BATCH_SIZE = 128  # prompts that are decoded together
BATCH_FIELDS = ("input_ids", "answer_mask", "document_ids", "positions")  # of rows without context


@dataclass(kw_only=True)
class OnPolicy:
    """On-policy rows of a tensor group, each member of which writes all of them."""

    conf: OnPolicyConf
    rows: Packed
    order: RowOrder
    language_model: LanguageModel  # the draft as a language model
    eos_ids: list[int]  # of the target, which end an answer
    rank: int = 0
    world_size: int = 1
    written: dict[int, Batch] = field(default_factory=dict)  # by row number

    def list_visits(self, step: int) -> list[tuple[int, bool]]:
        """Return the rows that the group visits in a step, and whether each is one that the draft has written."""
        # Drawn for the whole step, so that they do not depend on the number of processes.
        draws = np.random.default_rng([self.order.seed, 1, step]).random(self.order.rows_per_step)
        drafted = (draws < self.conf.share)[self.rank :: self.world_size].tolist()
        return [*zip(self.order.step_rows(step, self.rank, self.world_size), drafted, strict=True)]

    def renew(self, step: int, *, end: int) -> None:
        """Let the draft write the rows that the steps from here to the next renewal, or to the run's end, use."""
        later_steps = range(step, min(step + self.conf.interval - step % self.conf.interval, end))
        visits = [visit for later_step in later_steps for visit in self.list_visits(later_step)]
        row_numbers = sorted({number for number, is_drafted in visits if is_drafted})
        self.written = dict(zip(row_numbers, self._generate_rows(row_numbers, step), strict=True))

    def build_batch(self, row_numbers: list[int], drafted: list[bool]) -> Batch:
        """Build a batch of these rows; flagged rows are those that the draft has written."""
        rows = [
            self.written[number] if is_drafted else self.rows.batch([number])
            for number, is_drafted in zip(row_numbers, drafted, strict=True)
        ]
        return Batch(**{name: torch.cat([getattr(row, name) for row in rows]) for name in BATCH_FIELDS})

    def _generate_rows(self, row_numbers: list[int], step: int) -> list[Batch]:
        """Return the rows with the first answer of each document rewritten by the draft and what follows dropped."""
        rows = {number: self.rows.batch([number]) for number in row_numbers}
        spans = [(number, begin, end) for number, row in rows.items() for begin, end in first_answer_spans(row)]
        last_id = self.language_model.vocab_size - 1  # the target may have more ids
        prompts = [_read_prompt(rows[number], begin).clamp_max(last_id).tolist() for number, begin, _ in spans]
        # They key the sampling noise, so they must be the same on any process.
        row_ids = [number * self.rows.length + begin for number, begin, _ in spans]
        answers = generate_answers(
            self.language_model,
            prompts,
            max_new_tokens=[end - begin for _, begin, end in spans],
            eos_ids=self.eos_ids,
            sampling=SamplingConf(temperature=self.conf.temperature, seed=self.order.seed + step),
            batch=ANSWER_BATCH_SIZE,
            row_ids=row_ids,
            slots=self.rows.length,
        )
        for index, answer_ids in answers:
            number, begin, end = spans[index]
            row, new_ids = rows[number], answer_ids[: end - begin]
            row.input_ids[0, begin : begin + len(new_ids)] = torch.tensor(new_ids)
            rest = row.document_ids[0] == row.document_ids[0, begin].clone()
            rest[: begin + len(new_ids)] = False
            row.document_ids[0, rest] = -1  # padding
            row.answer_mask[0, rest] = False
        return [*rows.values()]


def _read_prompt(row: Batch, begin: int) -> Tensor:
    """Return the tokens of a document before its answer, which begins at `begin`."""
    inside = row.document_ids[0, :begin] == row.document_ids[0, begin]
    return row.input_ids[0, :begin][inside]


def first_answer_spans(row: Batch) -> list[tuple[int, int]]:
    """Return [begin, end) of the first answer of each document with a prompt in `row`, a batch of one row."""
    spans = []
    for document_id in range(int(row.document_ids.max()) + 1):
        inside = row.document_ids[0] == document_id
        in_answer = row.answer_mask[0] & inside
        begin = int(in_answer.int().argmax())  # the first True
        length = int(in_answer[begin:].int().cumprod(0).sum())  # the run of True from there
        if in_answer.any() and begin > int(inside.int().argmax()):
            spans.append((begin, begin + length))
    return spans
