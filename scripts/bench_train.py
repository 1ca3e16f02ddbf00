"""Training speed: tokens/s of whole steps, compiled or not, with either form of the loss.

And with features that were kept from an epoch before, as the demo trains.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infer.report.tables import Table
from models.distill.losses import distillation
from models.drafts import feature
from models.drafts.base import Batch, Draft, Loss
from models.target.language_model import Seen
from models.target.target import Target
from train.config import TrainConf

PROMPT = 32  # tokens of each row that are no answer


@dataclass(kw_only=True)
class Learner:
    """One way to take the steps."""

    compiled: bool
    plain: bool
    loss: Callable[[Batch, object], Loss]
    kept: Seen | None = None  # what the target sees, where it does not look again
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self, tokens: int) -> float:
        return tokens * len(self.seconds) / sum(self.seconds)


def compare(conf: TrainConf, target: Target, *, steps: int) -> Table:
    """The table: tokens/s of each way, and the first way over it."""
    draft = conf.draft.build(target, loss=conf.loss, seed=conf.seed)
    batch = rows(target, number=conf.optim.batch_size, length=conf.data.length)
    compile_ = target.device.compile
    ways = [Learner(compiled=False, plain=False, loss=draft.loss)]
    ways.append(Learner(compiled=False, plain=True, loss=draft.loss))
    kept = see(target, batch, draft)
    ways.append(Learner(compiled=False, plain=False, loss=draft.loss, kept=kept))
    if target.device.compiles:
        ways.insert(0, Learner(compiled=True, plain=False, loss=compile_(draft.loss)))
        ways.insert(1, Learner(compiled=True, plain=True, loss=compile_(draft.loss)))
        ways.append(Learner(compiled=True, plain=False, loss=compile_(draft.loss), kept=kept))
    optimizers, _ = conf.optim.build(draft)
    for way in ways:
        learn(way, draft, target, batch, optimizers)  # compiles; not timed
    for turn in range(steps):
        for way in ways if turn % 2 == 0 else reversed(ways):
            began = time.perf_counter()
            learn(way, draft, target, batch, optimizers)
            target.device.synchronize()
            way.seconds.append(time.perf_counter() - began)
    return _table(ways, tokens=batch.ids.numel(), steps=steps, conf=conf)


def rows(target: Target, *, number: int, length: int) -> Batch:
    """Random tokens, one document a row: a step costs the same whatever they say."""
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (number, length), generator=numbers)
    place = torch.arange(length).expand_as(ids)
    document = torch.zeros_like(ids)
    batch = Batch(ids=ids, answer=place >= PROMPT, document=document, positions=place)
    return batch.to(target.device.torch_device)


@torch.no_grad()
def see(target: Target, batch: Batch, draft: Draft) -> Seen:
    return target.see(
        batch.ids, positions=batch.positions, mask=batch.attends(), layers=draft.needs.layers
    )


def learn(
    way: Learner, draft: Draft, target: Target, batch: Batch,
    optimizers: list[torch.optim.Optimizer],
) -> Tensor:  # fmt: skip
    """One step as the training loop takes it: target, loss, gradient, optimizer."""
    seen = way.kept or see(target, batch, draft)
    with loss_form(plain=way.plain):
        loss = way.loss(batch, seen)
        mean = loss.total / loss.weight
        mean.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return mean.detach()


@contextmanager
def loss_form(*, plain: bool) -> Iterator[None]:
    """The draft's chunked loss, or the plain one in its place."""
    chunked = feature.chunked_distillation
    if plain:
        feature.chunked_distillation = distillation
    try:
        yield
    finally:
        feature.chunked_distillation = chunked


def _table(ways: list[Learner], *, tokens: int, steps: int, conf: TrainConf) -> Table:
    best = ways[0].tokens_per_s(tokens)
    table_rows = [
        [
            "yes" if way.compiled else "no", "plain" if way.plain else "chunked",
            "kept" if way.kept else "live",
            f"{way.tokens_per_s(tokens):.0f}", f"{best / way.tokens_per_s(tokens):.2f}",
        ]
        for way in ways
    ]  # fmt: skip
    return Table(
        title="Training",
        note=f"Whole steps of {tokens} tokens: target, {conf.draft.method} draft with its unroll, "
        f"backward, optimizer. {steps} steps of each way in turning order; chunks of "
        f"{conf.loss.chunk} draft rows.",
        columns=["compiled", "loss", "features", "tokens/s", "first row / this"],
        rows=table_rows,
        labels=3,
    )
