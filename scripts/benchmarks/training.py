"""Training speed: tokens/s of complete steps, compiled or not, with either form of the loss.

A further case reuses the features of an earlier epoch, as the demo does.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from data.features.target_pass import run_target
from infer.report.tables import Table
from models.batch import Batch
from models.drafts import loss as draft_loss
from models.drafts.base import Draft
from models.drafts.loss import LossModule
from models.drafts.registry import build_draft
from models.losses.chunked import ChunkEvaluator, Metrics
from models.targets.language_model import TargetOutput
from models.targets.target import Target
from scripts.benchmarks.loss import distillation_loss
from train.config.run import TrainConf
from train.graph_warmup import draw_rows
from train.optim import build_optimizers

PROMPT = 32  # prompt tokens of each row


@dataclass(kw_only=True)
class Learner:
    """A configuration of the training step, with its measured times."""

    loss: nn.Module
    compiled: bool = False
    plain: bool = False
    features: TargetOutput | None = None  # the features if the target pass is skipped
    seconds: list[float] = field(default_factory=list)

    def tokens_per_s(self, tokens: int) -> float:
        return tokens * len(self.seconds) / sum(self.seconds)


def compare(conf: TrainConf, target: Target, *, steps: int) -> Table:
    """Build the table: tokens/s of each configuration, and the first one's speed over it."""
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed)
    number = conf.optim.micro_batch_rows(conf.optim.rows_per_step)
    # Random tokens, which do not affect the cost.
    batch = draw_rows(number, conf.data.row_length, target.vocab_size).batch(list(range(number)))
    batch = replace(batch, answer_mask=batch.positions >= PROMPT).to(target.device.torch_device)
    eager, compiled = (LossModule(draft, target.device, compiled=compiled) for compiled in (False, True))
    with torch.no_grad():
        features = run_target(target, draft.needs.layers, batch)
    learners = [Learner(loss=eager), Learner(loss=eager, plain=True), Learner(loss=eager, features=features)]
    if target.device.compiles:
        kept = Learner(loss=compiled, compiled=True, features=features)
        learners = [Learner(loss=compiled, compiled=True), *learners, kept]
    optimizers, _ = build_optimizers(conf.optim, draft)
    for learner in learners:
        learn(learner, draft, target, batch, optimizers)  # compiles; not timed
    for turn in range(steps):
        for learner in learners if turn % 2 == 0 else reversed(learners):
            began = time.perf_counter()
            learn(learner, draft, target, batch, optimizers)
            target.device.synchronize()
            learner.seconds.append(time.perf_counter() - began)
    return _table(learners, tokens=batch.input_ids.numel(), steps=steps, conf=conf)


def learn(
    learner: Learner, draft: Draft, target: Target, batch: Batch, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Take one step like the training loop: target, loss, gradient, optimizer."""
    with torch.no_grad():
        target_output = learner.features or run_target(target, draft.needs.layers, batch)
    plain = patch.object(draft_loss, "chunked_distillation_loss", compute_at_once)
    with plain if learner.plain else nullcontext():
        loss = learner.loss(batch, target_output, {})
        (loss.total / loss.weight).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def compute_at_once(evaluate: ChunkEvaluator, **inputs: Any) -> tuple[Tensor, Metrics]:  # noqa: ARG001
    """Compute a loss without chunks, which nothing evaluates then."""
    return distillation_loss(**inputs)


def _table(learners: list[Learner], *, tokens: int, steps: int, conf: TrainConf) -> Table:
    first_speed = learners[0].tokens_per_s(tokens)
    table_rows = [
        [
            "yes" if learner.compiled else "no",
            "plain" if learner.plain else "chunked",
            "kept" if learner.features else "live",
            f"{learner.tokens_per_s(tokens):.0f}",
            f"{first_speed / learner.tokens_per_s(tokens):.2f}",
        ]
        for learner in learners
    ]
    return Table(
        title="Training",
        note=f"Whole steps of {tokens} tokens: target, {conf.draft.method} draft with its unroll, "
        f"backward, optimizer. {steps} steps of each way in turning order; chunks of "
        f"{conf.loss.logits_chunk} draft rows.",
        columns=["compiled", "loss", "features", "tokens/s", "first row / this"],
        rows=table_rows,
        label_columns=3,
    )
