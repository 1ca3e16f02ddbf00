"""On-policy rows: the draft trains on answers that it has written itself (DistillSpec).

Every `every` steps, the draft rewrites the rows that it will visit until the next renewal. Which
visits use them, and what is written, depend on the seed, the step, the row and the weights at the
renewal alone, not on the process. States are saved at renewals, so a continued run writes the same
rows again.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from data.config import OnPolicyConf
from data.packing.documents import Packed
from data.packing.sampler import RowOrder
from infer.engine.generate import generate_answers
from models.drafts.base import Batch
from models.speculate.sampling import SamplingConf
from models.target.language_model import LanguageModel

ANSWER_BATCH_SIZE = 128  # prompts that are decoded together
BATCH_FIELDS = ("input_ids", "answer_mask", "document_ids", "positions")  # rows without context


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
        """Flag those of this process's visits in a step that use rows written by the draft."""
        numbers = np.random.default_rng([self.order.seed, 1, step]).random(self.order.batch_size)
        return (numbers < self.conf.share)[self.rank :: self.world_size].tolist()

    def renew(self, step: int) -> None:
        """Write the rows that the steps from here to the next renewal use."""
        rows = [
            row
            for later_step in range(step, step + self.conf.every)
            for row, is_drafted in zip(
                self.order.batch_rows(later_step, self.rank, self.world_size),
                self.select_rows(later_step),
                strict=True,
            )
            if is_drafted
        ]
        numbers = sorted(set(rows))
        self.written = dict(zip(numbers, self._generate_rows(numbers, step), strict=True))

    def build_batch(self, rows: list[int], drafted: list[bool]) -> Batch:
        """Build a batch of these rows, those flagged as the draft has written them."""
        parts = [
            self.written[row] if is_drafted else self.rows.batch([row])
            for row, is_drafted in zip(rows, drafted, strict=True)
        ]
        return Batch(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in BATCH_FIELDS}
        )

    def _generate_rows(self, numbers: list[int], step: int) -> list[Batch]:
        rows = [self.rows.batch([row]) for row in numbers]
        spans, keys, prompts = [], [], []
        for number, row in zip(numbers, rows, strict=True):
            for begin, end in first_answer_spans(row):
                spans.append((row, begin, end))
                keys.append(number * self.rows.length + begin)  # the same on any process
        for row, begin, _ in spans:
            inside = row.document_ids[0, :begin] == row.document_ids[0, begin]
            prompts.append(row.input_ids[0, :begin][inside].tolist())
        sampling = SamplingConf(temperature=self.conf.temperature, seed=self.order.seed + step)
        answers = generate_answers(
            self.language_model, prompts, max_new_tokens=[end - begin for _, begin, end in spans],
            sampling=sampling, batch=ANSWER_BATCH_SIZE, row_ids=keys, slots=self.rows.length,
        )  # fmt: skip
        for index, ids in answers:
            row, begin, end = spans[index]
            ids = ids[: end - begin]
            row.input_ids[0, begin : begin + len(ids)] = torch.tensor(ids)
            rest = row.document_ids[0] == row.document_ids[0, begin].clone()
            rest[: begin + len(ids)] = False
            row.document_ids[0, rest] = -1  # drops the rest of the old answer, and later turns
            row.answer_mask[0, rest] = False
        return rows


def first_answer_spans(row: Batch) -> list[tuple[int, int]]:
    """Return [begin, end) of the first answer of each document that has a prompt."""
    spans = []
    for number in range(int(row.document_ids.max()) + 1):
        inside = row.document_ids[0] == number
        answer = row.answer_mask[0] & inside
        begin = int(answer.int().argmax())
        rest = (~answer[begin:]).nonzero()
        length = int(rest[0]) if len(rest) else len(answer) - begin
        if answer.any() and begin > int(inside.int().argmax()):
            spans.append((begin, begin + length))
    return spans
