"""The training loop. It knows steps, rows and weights, and nothing of how a draft learns.

Everything a step does is a function of its number and of the saved state, so that a run which was
killed and continued ends in the weights of an unbroken one.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import cast

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.features.reader import Store
from data.packing.documents import Packed
from data.packing.sampler import Order
from models.device import Device
from models.drafts.base import Batch, Draft, Extras, Loss
from models.errors import UserError
from models.parallel.dtensor import whole
from models.target.language_model import Seen
from models.target.target import Target
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.extension import set_goal
from train.log import Log, Steps
from train.metric_buffer import Window
from train.optim import start
from train.planning import graph_plan
from train.rows.features import Features
from train.rows.on_policy import OnPolicy
from train.rows.prefetch import Ahead
from train.run_dir import refuse_full_disk
from train.save_times import SaveTimes
from train.state import Learning, Progress, State

log = logging.getLogger(__name__)


class Lesson(nn.Module):
    """A draft whose forward pass is its loss: the module that Accelerate wraps and casts."""

    def __init__(self, draft: Draft, device: Device, *, compiled: bool):
        super().__init__()
        self.draft = draft
        self.loss: Callable[..., Loss] = device.compile(draft.loss) if compiled else draft.loss

    def forward(self, batch: Batch, seen: Seen, extras: Extras) -> Loss:
        return self.loss(batch, seen, **extras)


@dataclass(kw_only=True)
class Micro:
    """Rows that a process learns from at a time."""

    batch: Batch
    seen: Seen | None  # by the target, on the host; None: it is asked in the step
    extras: Extras
    term_weights: Tensor | None

    def to(self, device: torch.device) -> "Micro":
        """Move all but `seen`, which is large: the step moves it when its turn comes."""
        return Micro(
            batch=self.batch.to(device),
            seen=self.seen,
            extras={name: extra.to(device) for name, extra in self.extras.items()},
            term_weights=None if self.term_weights is None else self.term_weights.to(device),
        )


def expected_length(values: dict[str, float]) -> dict[str, float]:
    """Acceptance length of a chain, where a method reports `hit_<i>`.

    That is the share of its i-th tokens that are right where those before them were.

    >>> expected_length({"hit_1": 0.5, "hit_2": 0.5})
    {'tau': 1.75}
    """
    hits = [values[f"hit_{i}"] for i in range(1, len(values) + 1) if f"hit_{i}" in values]
    return {"tau": 1 + sum(accumulate(hits, mul))} if hits else {}


def share_of_rows(steps: int, rows_a_step: int, rows: int) -> str:
    """Say how much of the data a run will see.

    >>> share_of_rows(300, 8, 40_000)
    '300 steps x 8 rows = 2,400 of 40,000 rows (0.06 epochs)'
    """
    visits = steps * rows_a_step
    return (
        f"{steps:,} steps x {rows_a_step:,} rows = {visits:,} of {rows:,} rows "
        f"({visits / rows:.3g} epochs)"
    )


@dataclass(kw_only=True)
class Loop:
    """One run over the steps of `conf.optim`, from where its state stands on."""

    conf: TrainConf
    parallel: Parallel
    device: Device
    target: Target
    draft: Draft
    rows: Packed
    state: State
    log: Log
    evaluate: Callable[[Draft], dict[str, float]]  # real decoding; has delivered_per_round
    store: Store | None = None  # of the rows' features; None: the target is asked

    @property
    def accelerator(self) -> Accelerator:
        return self.parallel.accelerator

    def run(self) -> Progress:
        """Train to the last step; the checkpoint that delivers most a round is in the folder."""
        conf = self.conf
        needed = graph_plan.graphs(conf, lazy=self.device.lazy)
        with self.device.expecting(needed, log.info) as self.counted:
            self._prepare()
            with closing(self.ahead):
                return self._train()

    def rehearse(self, each: Callable[[str], None]) -> None:
        """One step on whatever rows there are: all is compiled, and nothing is kept."""
        needed = graph_plan.graphs(self.conf, lazy=self.device.lazy)
        with self.device.expecting(needed, log.info, each=each) as self.counted:
            self._prepare()
            with closing(self.ahead):
                self._learn(0)

    def _train(self) -> Progress:
        conf, steps = self.conf, self.rate.steps
        log.info(share_of_rows(steps, conf.optim.rows, len(self.rows)))
        self._restart_clock()
        full_disk = refuse_full_disk(self.state.folder)
        with full_disk, Steps(done=self.state.progress.step, steps=steps) as self.shown:
            for step in range(self.state.progress.step, steps):
                self._learn(step)
                done = self.state.progress.step = step + 1
                measures = done == steps or done % conf.eval_every == 0
                if measures or self.saves.due(done) or done % conf.log.every == 0:
                    # Before anything is kept: the losses must have been finite.
                    values = self._report()
                    if measures:
                        values |= self._measure()
                    self.log.write(done, values)
                    self.saves.read_clock()
                if self.saves.due(done):
                    self._save()
        return self.state.progress

    def _save(self) -> None:
        if self.state.progress.step == self.kept:
            self.state.progress.kept = self.kept
        self.state.save(self.learning, self.parallel)
        self.saves.restart()
        self._restart_clock()

    def _set_goal(self) -> None:
        """Decide how far the run goes, from which state, and which states it saves."""
        conf, multiple = self.conf, self.conf.renewal
        self.rate = set_goal(
            self.state, conf.optim, self.parallel, rows=len(self.rows), multiple=multiple
        )
        self.log.forget_after(self.state.progress.step)
        last = self.rate.extendable_from
        self.kept = None if last is None else last // multiple * multiple
        self.saves = SaveTimes(
            parallel=self.parallel, minutes=conf.save_minutes, every=conf.save_every,
            multiple=multiple, always={self.rate.steps, self.kept or 0},
        )  # fmt: skip

    def _prepare(self) -> None:
        conf = self.conf
        self._set_goal()
        compiled = conf.optim.compile and self.parallel.compiles_loss
        lesson = Lesson(self.draft, self.device, compiled=compiled)
        self.lesson = self.parallel.prepare(lesson)
        # of what is left here of the weights
        optimizers, schedules = conf.optim.build(self.draft, self.parallel.adamw, rate=self.rate)
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in optimizers]
        self.schedules = [self.accelerator.prepare(schedule) for schedule in schedules]
        self.trained = [p for p in self.lesson.parameters() if p.requires_grad]
        # The order deals whole steps, so that splitting them changes nothing.
        self.order = Order(seed=conf.data.seed, rows=len(self.rows), batch_size=conf.optim.rows)
        self.at_a_time = conf.optim.at_a_time(conf.optim.rows // self.parallel.data)
        self.features = Features(
            self.target, self.rows, self.draft.needs.layers, store=self.store,
            keep=conf.data.keep_features, batch_size=conf.optim.batch_size,
            compiled=graph_plan.compiles_features(conf) and not self.device.lazy,
        )  # fmt: skip
        self.on_policy = self._on_policy()
        self.ahead = Ahead(
            self._micros, steps=self.rate.steps, early=self.on_policy is None
        )  # what a draft writes itself depends on the step before
        self.learning = Learning(module=self.lesson, optimizers=optimizers, schedules=[*schedules])
        self.device.glue(start)(optimizers)
        self.state.load(self.learning, self.parallel)
        self.parallel.begin(optimizers)
        self._step = self.device.glue(self.optimizer_step)
        self.window = Window(steps=conf.log.every)
        # Layers that are random while they train, such as a language model's dropout, would draw by
        # process and micro-batch: `Draft.prepare_batch` draws by row.
        self.draft.eval()

    def _on_policy(self) -> OnPolicy | None:
        conf, speaker = self.conf.data.on_policy, self.draft.speaker()
        if not conf.share or speaker is None:
            return None
        return OnPolicy(
            conf=conf, rows=self.rows, order=self.order, speaker=speaker,
            rank=self.parallel.rank, world=self.parallel.data,
        )  # fmt: skip

    def _learn(self, step: int) -> None:
        place = self.accelerator.device
        self._step({n: micro.to(place) for n, micro in enumerate(self.ahead.take(step))})
        for schedule in self.schedules:
            schedule.step()

    def optimizer_step(self, micros: dict[int, Micro]) -> None:
        """One step: the gradient of the summed loss over all rows / its summed weight."""
        accelerator = self.accelerator
        known = self._step_weights([*micros.values()])
        sums: dict[str, Tensor] = {}
        for place, micro in micros.items():
            batch, seen = micro.batch, micro.seen
            seen = seen.to(accelerator.device) if seen else self.features.see(batch)
            last = place == len(micros) - 1
            with nullcontext() if last else accelerator.no_sync(self.lesson):
                loss = self.lesson(batch, seen, micro.extras | known)
                accelerator.backward(loss.total)
            tokens = batch.document >= 0
            here = loss.metrics | {
                "loss": torch.stack([loss.total.detach(), loss.weight]).float(),
                "tokens": torch.stack([tokens.sum(), (tokens & batch.answer).sum()]).float(),
            }
            sums = {name: sums[name] + pair if sums else pair for name, pair in here.items()}

        weight = self.parallel.total(sums["loss"])[1]
        # Gradients arrive as the mean over processes; a step without any answer moves nothing.
        scale = accelerator.num_processes / weight.clamp_min(torch.finfo(weight.dtype).tiny)
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        norm = whole(cast(Tensor, accelerator.clip_grad_norm_(self.trained, self.conf.optim.clip)))
        self.window.add(sums | {"grad_norm": torch.stack([norm, torch.ones_like(norm)])})
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _step_weights(self, micros: list[Micro]) -> Extras:
        """Sum what the terms of the loss weigh over all rows of the step, where they say it."""
        weights = [m.term_weights for m in micros if m.term_weights is not None]
        if not weights:
            return {}
        return {"step_weights": self.parallel.total(torch.stack(weights).sum(0))}

    def _micros(self, step: int) -> list[Micro]:
        """This process's share of a step, on the host."""
        size, micros = self.at_a_time, []
        rows = self.order.batch(step, self.parallel.rank, self.parallel.data)
        own = self._own_words(step, len(rows))
        for first in range(0, len(rows), size):
            some, mine = rows[first : first + size], own[first : first + size]
            if self.on_policy is not None and any(mine):
                batch, seen = self.on_policy.rewrite(some, mine), None
            else:
                batch, seen = self.rows.batch(some), self.features.of(some)
            generators = [np.random.default_rng([self.conf.seed, step, row]) for row in some]
            extras = self.draft.prepare_batch(batch, step=step, generators=generators)
            weights = self.draft.term_weights(batch)
            micros.append(Micro(batch=batch, seen=seen, extras=extras, term_weights=weights))
        return micros

    def _own_words(self, step: int, count: int) -> list[bool]:
        """Which of this process's rows the draft has written itself."""
        if self.on_policy is None:
            return [False] * count
        if step % self.on_policy.conf.every == 0:
            with self.parallel.whole(self.draft):
                self.on_policy.renew(step)
        return self.on_policy.chosen(step)

    def _report(self) -> dict[str, float]:
        """Read the window and say what it holds. Raises UserError where the loss is not finite."""
        done = self.state.progress.step
        read = self.window.read(self.parallel)
        losses = [total / weight if weight else 0.0 for total, weight in read.pop("loss")]
        for step, loss in enumerate(losses, start=done - len(losses) + 1):
            if not math.isfinite(loss):
                raise UserError(
                    f"optim.lr: the loss must stay finite, got {loss} at step {step}; lower "
                    "optim.lr or optim.clip under another run_name (the last good state is kept)"
                )
        took = time.perf_counter() - self.clock
        sums = {name: map(sum, zip(*steps, strict=True)) for name, steps in read.items()}
        # The processes of a tensor group read the same rows.
        tokens, answers = (count / self.conf.parallel.tensor for count in sums.pop("tokens"))
        lr = self.conf.optim.lr * self.rate.factor(done - 1)
        values = {"loss": sum(losses) / len(losses), "lr": lr}
        values |= {name: total / max(count, 1) for name, (total, count) in sums.items()}
        values |= self._seen_so_far(round(tokens), round(answers))
        values["tokens_per_s"] = tokens / took
        values["data_wait"] = self.ahead.waited / took
        values |= expected_length(values)
        if self.counted is not None:
            values["graphs_unannounced"] = self.counted.unannounced
        self.shown.report(done, values, seconds_a_step=took / (done - self.since))
        self._restart_clock()
        return {f"train/{name}": value for name, value in values.items()}

    def _seen_so_far(self, tokens: int, answer_tokens: int) -> dict[str, float]:
        """Add what the last steps have learned from to what the run has since its beginning."""
        progress = self.state.progress
        progress.tokens += tokens
        progress.answer_tokens += answer_tokens
        visits = progress.step * self.conf.optim.rows
        seen = {"rows": visits, "tokens": progress.tokens, "answer_tokens": progress.answer_tokens}
        return {name: float(count) for name, count in seen.items()} | {
            "epochs": visits / len(self.rows)
        }

    def _restart_clock(self) -> None:
        """Training time only: neither measuring nor saving counts."""
        self.clock, self.since = time.perf_counter(), self.state.progress.step
        self.ahead.waited = 0.0

    def _measure(self) -> dict[str, float]:
        """Decode held-out prompts; keep this draft if it is the best so far."""
        values: dict[str, float] = {}
        with self.parallel.whole(self.draft):
            if self.parallel.runs_target:
                values = self.evaluate(self.draft)
                self._keep_if_best(values["delivered_per_round"])
        self.parallel.wait()
        self._restart_clock()
        return {f"eval/{name}": value for name, value in values.items()}

    def _keep_if_best(self, found: float) -> None:
        progress = self.state.progress
        # tokens a round alone would choose an adapted target that repeats itself: there the last
        adapts = self.draft.verifier(self.target) is not None
        if progress.best is None or found > progress.best or adapts:
            progress.best, progress.best_step = found, progress.step
            if self.parallel.main:
                self.draft.save(self.state.folder / "checkpoint", self.target)
        log.info(
            "step %d  delivered tokens a round %.3f, best %.3f at step %s",
            progress.step, found, progress.best, progress.best_step,
        )  # fmt: skip
