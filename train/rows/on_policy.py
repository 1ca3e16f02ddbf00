"""Rows whose answers the draft wrote itself: it learns where its own words lead (DistillSpec).

Every `every` steps the draft writes anew what it will meet until the next time. Which visits meet
its own words, and what it writes, follow from the seed, the step, the row and the weights at the
renewal alone, not from the process; states are saved at renewals, so a continued run writes the
same again.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from data.config import OnPolicyConf
from data.packing.documents import Packed
from data.packing.sampler import Order
from infer.engine.generate import answers
from models.drafts.base import Batch
from models.speculate.sampling import SamplingConf
from models.target.language_model import Transformer

BATCH = 128  # prompts that are answered together
PARTS = ("ids", "answer", "document", "positions")  # of a row; such rows have no context


@dataclass(kw_only=True)
class OnPolicy:
    """The rows of one process, as its draft writes them."""

    conf: OnPolicyConf
    rows: Packed
    order: Order
    speaker: Transformer  # the draft as a language model
    rank: int = 0
    world: int = 1
    written: dict[int, Batch] = field(default_factory=dict)  # by number of the row

    def chosen(self, step: int) -> list[bool]:
        """Which of this process's visits in a step meet the draft's own words."""
        numbers = np.random.default_rng([self.order.seed, 1, step]).random(self.order.batch_size)
        return (numbers < self.conf.share)[self.rank :: self.world].tolist()

    def renew(self, step: int) -> None:
        """Write what the steps from here to the next renewal will meet."""
        met = [
            row
            for ahead in range(step, step + self.conf.every)
            for row, own in zip(
                self.order.batch(ahead, self.rank, self.world), self.chosen(ahead), strict=True
            )
            if own
        ]
        numbers = sorted(set(met))
        self.written = dict(zip(numbers, self._write(numbers, step), strict=True))

    def rewrite(self, rows: list[int], own: list[bool]) -> Batch:
        """These rows, some of them as the draft writes them."""
        parts = [
            self.written[row] if mine else self.rows.batch([row])
            for row, mine in zip(rows, own, strict=True)
        ]
        return Batch(**{name: torch.cat([getattr(part, name) for part in parts]) for name in PARTS})

    def _write(self, numbers: list[int], step: int) -> list[Batch]:
        rows = [self.rows.batch([row]) for row in numbers]
        spans, keys, prompts = [], [], []
        for number, row in zip(numbers, rows, strict=True):
            for begin, end in first_answers(row):
                spans.append((row, begin, end))
                keys.append(number * self.rows.length + begin)  # by row and place, on any process
        for row, begin, _ in spans:
            inside = row.document[0, :begin] == row.document[0, begin]
            prompts.append(row.ids[0, :begin][inside].tolist())
        sampling = SamplingConf(temperature=self.conf.temperature, seed=self.order.seed + step)
        done = answers(
            self.speaker, prompts, max_new_tokens=[end - begin for _, begin, end in spans],
            sampling=sampling, batch=BATCH, row_ids=keys, slots=self.rows.length,
        )  # fmt: skip
        for place, ids in done:
            row, begin, end = spans[place]
            ids = ids[: end - begin]
            row.ids[0, begin : begin + len(ids)] = torch.tensor(ids)
            rest = row.document[0] == row.document[0, begin].clone()
            rest[: begin + len(ids)] = False  # of the document: the old words, and later turns
            row.document[0, rest] = -1
            row.answer[0, rest] = False
        return rows


def first_answers(row: Batch) -> list[tuple[int, int]]:
    """Where the first answer of each document that has a prompt begins and ends: [begin, end)."""
    found = []
    for number in range(int(row.document.max()) + 1):
        inside = row.document[0] == number
        answer = row.answer[0] & inside
        begin = int(answer.int().argmax())
        others = (~answer[begin:]).nonzero()
        length = int(others[0]) if len(others) else len(answer) - begin
        if answer.any() and begin > int(inside.int().argmax()):
            found.append((begin, begin + length))
    return found
