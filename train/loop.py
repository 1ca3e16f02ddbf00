"""The training loop: steps, rows and weights, the same for every drafting method.

Everything a step does is a function of its number and of the saved state, so a run that was killed
and continued ends with the weights of an uninterrupted one.
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

from data.features.reader import FeatureStore
from data.packing.documents import Packed
from data.packing.sampler import RowOrder
from models.device import Device
from models.drafts.base import Batch, Draft, Extras, Loss, SpeculativePair
from models.errors import UserError
from models.parallel.dtensor import full_params, full_tensor
from models.target.language_model import TargetOutput
from models.target.target import Target
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.extension import set_total_steps
from train.log import MetricLogger, ProgressBar
from train.metric_buffer import MetricBuffer
from train.optim import start
from train.planning import graph_plan
from train.rows.features import TargetFeatures
from train.rows.on_policy import OnPolicy
from train.rows.prefetch import Prefetcher
from train.run_dir import refuse_full_disk
from train.save_times import SaveSchedule
from train.state import RunProgress, RunState, TrainingState

log = logging.getLogger(__name__)


class LossModule(nn.Module):
    """A draft whose forward pass is its loss: the module that Accelerate wraps and casts."""

    def __init__(self, draft: Draft, device: Device, *, compiled: bool):
        super().__init__()
        self.draft = draft
        self.loss: Callable[..., Loss] = device.compile_part(draft.loss) if compiled else draft.loss

    def forward(self, batch: Batch, target_output: TargetOutput, extras: Extras) -> Loss:
        return self.loss(batch, target_output, **extras)


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


def expected_length(values: dict[str, float]) -> dict[str, float]:
    """Compute the acceptance length of a chain, where a method reports `hit_<i>`.

    `hit_<i>` is the share of i-th tokens that are right, among those whose predecessors are.

    >>> expected_length({"hit_1": 0.5, "hit_2": 0.5})
    {'tau': 1.75}
    """
    hits = [values[f"hit_{i}"] for i in range(1, len(values) + 1) if f"hit_{i}" in values]
    return {"tau": 1 + sum(accumulate(hits, mul))} if hits else {}


def describe_coverage(steps: int, rows_per_step: int, rows: int) -> str:
    """Describe how much of the data a run will visit.

    >>> describe_coverage(300, 8, 40_000)
    '300 steps x 8 rows = 2,400 of 40,000 rows (0.06 epochs)'
    """
    visits = steps * rows_per_step
    return (
        f"{steps:,} steps x {rows_per_step:,} rows = {visits:,} of {rows:,} rows "
        f"({visits / rows:.3g} epochs)"
    )


@dataclass(kw_only=True)
class Trainer:
    """One run over the steps of `conf.optim`, from its saved state on."""

    conf: TrainConf
    parallel: Parallel
    device: Device
    target: Target
    draft: Draft
    rows: Packed
    state: RunState
    log: MetricLogger
    evaluate: Callable[[Draft], dict[str, float]]  # decodes; delivered_per_round and more
    store: FeatureStore | None = None  # of the rows; None: the target computes them

    @property
    def accelerator(self) -> Accelerator:
        return self.parallel.accelerator

    def run(self) -> RunProgress:
        """Train to the last step, and leave the best checkpoint in the run folder."""
        conf = self.conf
        needed = graph_plan.list_graphs(conf, lazy=self.device.lazy)
        with self.device.expect_graphs(needed, log.info) as self.graph_counter:
            self._prepare()
            with closing(self.prefetcher):
                return self._train()

    def warmup(self, on_graph: Callable[[str], None]) -> None:
        """Take one step, which compiles every graph; nothing of it is saved."""
        needed = graph_plan.list_graphs(self.conf, lazy=self.device.lazy)
        with self.device.expect_graphs(needed, log.info, on_graph=on_graph) as self.graph_counter:
            self._prepare()
            with closing(self.prefetcher):
                self._train_step(0)

    def _train(self) -> RunProgress:
        conf, steps = self.conf, self.rate.steps
        log.info(describe_coverage(steps, conf.optim.rows_per_step, len(self.rows)))
        self._restart_clock()
        full_disk = refuse_full_disk(self.state.folder)
        with (
            full_disk,
            ProgressBar(steps_done=self.state.progress.step, steps=steps) as self.progress_bar,
        ):
            for step in range(self.state.progress.step, steps):
                self._train_step(step)
                done = self.state.progress.step = step + 1
                evaluates = done == steps or done % conf.eval_every == 0
                if evaluates or self.saves.is_due(done) or done % conf.log.every == 0:
                    # Read before anything is saved: a loss that is not finite ends the run.
                    values = self._read_metrics()
                    if evaluates:
                        values |= self._evaluate_draft()
                    self.log.write(done, values)
                    self.saves.read_clock()
                if self.saves.is_due(done):
                    self._save()
        return self.state.progress

    def _save(self) -> None:
        if self.state.progress.step == self.extendable_step:
            self.state.progress.kept = self.extendable_step
        self.state.save(self.training_state, self.parallel)
        self.saves.restart()
        self._restart_clock()

    def _set_total_steps(self) -> None:
        """Decide how far the run goes, from which state, and which states it saves."""
        conf, multiple = self.conf, self.conf.renewal_interval
        self.rate = set_total_steps(
            self.state, conf.optim, self.parallel, rows=len(self.rows), multiple=multiple
        )
        self.log.drop_after(self.state.progress.step)
        last = self.rate.extendable_from
        self.extendable_step = None if last is None else last // multiple * multiple
        self.saves = SaveSchedule(
            parallel=self.parallel, minutes=conf.save_minutes, every_steps=conf.save_every,
            multiple=multiple, required_steps={self.rate.steps, self.extendable_step or 0},
        )  # fmt: skip

    def _prepare(self) -> None:
        conf = self.conf
        self._set_total_steps()
        compiled = conf.optim.compile and self.parallel.compiles_loss
        loss_module = LossModule(self.draft, self.device, compiled=compiled)
        self.loss_module = self.parallel.prepare(loss_module)
        # Built after sharding, from the weights that this process holds.
        optimizers, schedules = conf.optim.build(
            self.draft, self.parallel.adamw_class, rate=self.rate
        )
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in optimizers]
        self.schedules = [self.accelerator.prepare(schedule) for schedule in schedules]
        self.trained = [p for p in self.loss_module.parameters() if p.requires_grad]
        # The order is that of whole steps, so how a step is split changes nothing.
        self.order = RowOrder(
            seed=conf.data.seed, num_rows=len(self.rows), batch_size=conf.optim.rows_per_step
        )
        self.micro_batch_size = conf.optim.micro_batch_size(
            conf.optim.rows_per_step // self.parallel.num_data_ranks
        )
        self.features = TargetFeatures(
            self.target, self.rows, self.draft.needs.layers, store=self.store,
            in_memory=conf.data.keep_features, batch_size=conf.optim.batch_size,
            compiled=graph_plan.compiles_features(conf),
        )  # fmt: skip
        self.on_policy = self._build_on_policy()
        self.prefetcher = Prefetcher(
            self._build_micro_batches, steps=self.rate.steps, early=self.on_policy is None
        )  # on-policy rows depend on the weights after the step before
        self.training_state = TrainingState(
            module=self.loss_module, optimizers=optimizers, schedules=[*schedules]
        )
        self.device.compile_if_lazy(start)(optimizers)
        self.state.load(self.training_state, self.parallel)
        self.parallel.prepare_optimizers(optimizers)
        self._step = self.device.compile_if_lazy(self.optimizer_step)
        self.metric_buffer = MetricBuffer(steps=conf.log.every)
        # In training mode, random layers such as dropout would draw per process and micro-batch:
        # `Draft.prepare_batch` draws per row instead.
        self.draft.eval()

    def _build_on_policy(self) -> OnPolicy | None:
        conf, language_model = self.conf.data.on_policy, self.draft.as_language_model()
        if not conf.share or language_model is None:
            return None
        return OnPolicy(
            conf=conf, rows=self.rows, order=self.order, language_model=language_model,
            rank=self.parallel.data_rank, world_size=self.parallel.num_data_ranks,
        )  # fmt: skip

    def _train_step(self, step: int) -> None:
        device = self.accelerator.device
        self._step(
            {n: micro_batch.to(device) for n, micro_batch in enumerate(self.prefetcher.take(step))}
        )
        for schedule in self.schedules:
            schedule.step()

    def optimizer_step(self, micro_batches: dict[int, MicroBatch]) -> None:
        """Take one step by the gradient of the loss, summed over all rows / its summed weight."""
        accelerator = self.accelerator
        step_extras = self._sum_term_weights([*micro_batches.values()])
        sums: dict[str, Tensor] = {}
        for index, micro_batch in micro_batches.items():
            batch, target_output = micro_batch.batch, micro_batch.target_output
            target_output = (
                target_output.to(accelerator.device) if target_output else self.features.see(batch)
            )
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.loss_module):
                loss = self.loss_module(batch, target_output, micro_batch.extras | step_extras)
                accelerator.backward(loss.total)
            tokens = batch.document_ids >= 0
            pairs = loss.metrics | {
                "loss": torch.stack([loss.total.detach(), loss.weight]).float(),
                "tokens": torch.stack([tokens.sum(), (tokens & batch.answer_mask).sum()]).float(),
            }
            sums = {name: sums[name] + pair if sums else pair for name, pair in pairs.items()}

        weight = self.parallel.all_reduce_sum(sums["loss"])[1]
        # Gradients are means over the processes; a step without any answer changes nothing.
        scale = accelerator.num_processes / weight.clamp_min(torch.finfo(weight.dtype).tiny)
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        norm = full_tensor(
            cast(Tensor, accelerator.clip_grad_norm_(self.trained, self.conf.optim.clip))
        )
        self.metric_buffer.add(sums | {"grad_norm": torch.stack([norm, torch.ones_like(norm)])})
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _sum_term_weights(self, micro_batches: list[MicroBatch]) -> Extras:
        """Sum the weights of the loss's terms over all rows of the step; {} if it has none."""
        weights = [m.term_weights for m in micro_batches if m.term_weights is not None]
        if not weights:
            return {}
        return {"step_weights": self.parallel.all_reduce_sum(torch.stack(weights).sum(0))}

    def _build_micro_batches(self, step: int) -> list[MicroBatch]:
        """Build this process's share of a step, on the host."""
        size, micro_batches = self.micro_batch_size, []
        step_rows = self.order.batch_rows(
            step, self.parallel.data_rank, self.parallel.num_data_ranks
        )
        step_drafted = self._select_draft_rows(step, len(step_rows))
        for first in range(0, len(step_rows), size):
            rows, drafted = step_rows[first : first + size], step_drafted[first : first + size]
            if self.on_policy is not None and any(drafted):
                batch, target_output = self.on_policy.build_batch(rows, drafted), None
            else:
                batch, target_output = self.rows.batch(rows), self.features.lookup(rows)
            generators = [np.random.default_rng([self.conf.seed, step, row]) for row in rows]
            extras = self.draft.prepare_batch(batch, step=step, generators=generators)
            weights = self.draft.term_weights(batch)
            micro_batches.append(
                MicroBatch(
                    batch=batch, target_output=target_output, extras=extras, term_weights=weights
                )
            )
        return micro_batches

    def _select_draft_rows(self, step: int, count: int) -> list[bool]:
        """Flag those of this process's rows that the draft writes itself."""
        if self.on_policy is None:
            return [False] * count
        if step % self.on_policy.conf.every == 0:
            with full_params(self.draft):
                self.on_policy.renew(step)
        return self.on_policy.select_rows(step)

    def _read_metrics(self) -> dict[str, float]:
        """Read and average the buffered metrics; raise UserError if a loss is not finite."""
        done = self.state.progress.step
        step_sums = self.metric_buffer.read(self.parallel)
        losses = [total / weight if weight else 0.0 for total, weight in step_sums.pop("loss")]
        for step, loss in enumerate(losses, start=done - len(losses) + 1):
            if not math.isfinite(loss):
                raise UserError(
                    f"optim.lr: the loss must stay finite, got {loss} at step {step}; lower "
                    "optim.lr or optim.clip under another run_name (the last good state is kept)"
                )
        seconds = time.perf_counter() - self.clock
        sums = {name: map(sum, zip(*steps, strict=True)) for name, steps in step_sums.items()}
        # The processes of a tensor group read the same rows.
        tokens, answers = (count / self.conf.parallel.tensor for count in sums.pop("tokens"))
        lr = self.conf.optim.lr * self.rate.factor(done - 1)
        values = {"loss": sum(losses) / len(losses), "lr": lr}
        values |= {name: total / max(count, 1) for name, (total, count) in sums.items()}
        values |= self._update_totals(round(tokens), round(answers))
        values["tokens_per_s"] = tokens / seconds
        values["data_wait"] = self.prefetcher.wait_seconds / seconds
        values |= expected_length(values)
        if self.graph_counter is not None:
            values["graphs_unannounced"] = self.graph_counter.unannounced
        self.progress_bar.report(done, values, seconds_per_step=seconds / (done - self.since))
        self._restart_clock()
        return {f"train/{name}": value for name, value in values.items()}

    def _update_totals(self, tokens: int, answer_tokens: int) -> dict[str, float]:
        """Add the tokens of the last steps to the run's totals, and return the totals."""
        progress = self.state.progress
        progress.tokens += tokens
        progress.answer_tokens += answer_tokens
        visits = progress.step * self.conf.optim.rows_per_step
        totals = {
            "rows": visits,
            "tokens": progress.tokens,
            "answer_tokens": progress.answer_tokens,
        }
        return {name: float(count) for name, count in totals.items()} | {
            "epochs": visits / len(self.rows)
        }

    def _restart_clock(self) -> None:
        """Restart the clock of the training time, which excludes evaluation and saving."""
        self.clock, self.since = time.perf_counter(), self.state.progress.step
        self.prefetcher.wait_seconds = 0.0

    def _evaluate_draft(self) -> dict[str, float]:
        """Decode held-out prompts, and save this draft if it is the best so far."""
        values: dict[str, float] = {}
        with full_params(self.draft):
            if self.parallel.runs_target:
                values = self.evaluate(self.draft)
                self._save_if_best(values["delivered_per_round"])
        self.parallel.barrier()
        self._restart_clock()
        return {f"eval/{name}": value for name, value in values.items()}

    def _save_if_best(self, delivered: float) -> None:
        progress = self.state.progress
        # Tokens a round alone would favor a trained target that repeats itself: keep the last one.
        pair = SpeculativePair(target=self.target, draft=self.draft)
        trains_target = pair.adapted_target is not None
        if progress.best is None or delivered > progress.best or trains_target:
            progress.best, progress.best_step = delivered, progress.step
            if self.parallel.is_main:
                self.draft.save(self.state.folder / "checkpoint", self.target)
        log.info(
            "step %d  delivered tokens a round %.3f, best %.3f at step %s",
            progress.step, delivered, progress.best, progress.best_step,
        )  # fmt: skip
