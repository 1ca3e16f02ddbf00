"""The training loop: steps, rows and weights, the same for every drafting method.

Everything a step does is a function of its number and of the saved state, so a run that was killed
and continued ends with the weights of an uninterrupted one.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn

from data.features.reader import FeatureStore
from data.packing.documents import Packed
from models.drafts.base import Draft, Extras
from models.drafts.loss import LossModule
from models.io.errors import require
from models.parallel.dtensor import full_params, full_tensor
from models.parallel.local_shards import own_rows
from models.targets.language_model import TargetOutput
from models.targets.target import Target
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.optim import allocate_optimizer_states, build_optimizers, trained_parameters
from train.planning import graph_plan
from train.quick_eval import chain_acceptance_length
from train.rows.features import TargetFeatures
from train.rows.micro_batches import MicroBatch, MicroBatchBuilder
from train.run.log import MetricBuffer, MetricLogger, ProgressBar, drop_later_lines
from train.run.state import RunProgress, RunState, SaveSchedule, TrainingState

log = logging.getLogger(__name__)


def average_by_step(pairs: list[tuple[float, float]], *, last_step: int, quantity: str = "loss") -> list[float]:
    """Return each step's loss, or another quantity, from its sum and weight; raise UserError if it is not finite."""
    # A step whose rows contain no answer has weight 0.
    values = [total / weight if weight else 0.0 for total, weight in pairs]
    for step, value in enumerate(values, start=last_step - len(values) + 1):
        require(
            math.isfinite(value),
            f"optim.lr: the {quantity} must stay finite, got {value} at step {step}; start again under another "
            "run_name with a lower optim.lr or optim.max_grad_norm (the last good state is kept)",
        )
    return values


@dataclass(kw_only=True)
class Trainer:
    """One run over the steps of `conf.optim`; its parts are built on first use."""

    conf: TrainConf
    parallel: Parallel
    target: Target
    draft: Draft
    rows: Packed
    run_state: RunState
    metric_logger: MetricLogger
    evaluate: Callable[[Draft], dict[str, float]]  # the first figure chooses the checkpoint
    store: FeatureStore | None = None  # holds the rows' features; None: the target computes them
    clock_start: float = 0.0  # of the steps since the last log line
    clock_start_step: int = 0
    wait_seconds: float = 0.0  # for micro-batches, since then

    @cached_property
    def steps(self) -> int:
        """Return the steps of the whole run."""
        return self.conf.optim.total_steps(len(self.rows))

    @cached_property
    def loss_module(self) -> nn.Module:
        """Return the draft as Accelerate wraps it."""
        # In training mode, random layers such as dropout would draw per process and micro-batch:
        # `Draft.prepare_batch` draws per row instead.
        self.draft.eval()
        self.draft.recomputes = self.conf.optim.recompute
        is_compiled = self.conf.optim.compile_loss and self.parallel.compiles_loss
        return self.parallel.prepare(LossModule(self.draft, self.parallel.device, compiled=is_compiled))

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        return trained_parameters(self.loss_module)

    @cached_property
    def training_state(self) -> TrainingState:
        module = self.loss_module  # first: the optimizers take the weights that sharding leaves
        optimizers, schedules = build_optimizers(
            self.conf.optim, self.draft, self.parallel.adamw_class, steps=self.steps
        )
        return TrainingState(module=module, optimizers=optimizers, schedules=[*schedules])

    @cached_property
    def wrapped(self) -> tuple[list[AcceleratedOptimizer], list[AcceleratedScheduler]]:
        """Return optimizers and schedules as Accelerate steps them."""
        prepare, state = self.parallel.accelerator.prepare, self.training_state
        return [*map(prepare, state.optimizers)], [*map(prepare, state.schedules)]

    @cached_property
    def features(self) -> TargetFeatures:
        layers, compiled = self.draft.needs.layers, graph_plan.compiles_features(self.conf)
        return TargetFeatures(self.target, self.rows, layers, store=self.store, compiled=compiled)

    @cached_property
    def builder(self) -> MicroBatchBuilder:
        return MicroBatchBuilder(self.conf, self.parallel, self.draft, self.features)

    @cached_property
    def step_inputs(self) -> Generator[list[MicroBatch]]:
        """Return an iterator over the micro-batches of each step to come."""
        return self.builder.iterate_steps(range(self.run_state.progress.step, self.steps))

    @cached_property
    def metric_buffer(self) -> MetricBuffer:
        interval = self.conf.interval
        return MetricBuffer(steps=min(interval.log, interval.eval, self.steps))  # read at each of these

    @cached_property
    def _run_train_step(self) -> Callable[[dict[int, MicroBatch]], None]:
        """Return `train_step`, as one graph on a lazy device."""
        return self.parallel.device.compile_if_lazy(self.train_step)

    def run(self) -> RunProgress:
        """Train to the last step, fill the run folder, return progress; raise UserError if a loss is not finite."""
        conf, progress, steps = self.conf, self.run_state.progress, self.steps
        progress.num_rows, progress.steps = len(self.rows), steps
        saves = SaveSchedule(parallel=self.parallel, minutes=conf.interval.save_minutes, every_steps=conf.save_interval)
        bar = ProgressBar(steps_done=progress.step, steps=steps)
        with self._prepare_steps(), bar:
            rows, rows_per_step = len(self.rows), conf.optim.rows_per_step
            visited = f"{steps:,} steps x {rows_per_step:,} rows = {steps * rows_per_step:,} rows"
            log.info("%s (%.3g epochs of %s)", visited, steps * rows_per_step / rows, f"{rows:,}")
            if not (deal := self.builder.deal).is_even:
                processes = self.parallel.accelerator.num_processes
                log.info(
                    "%d processes learn each row; optim.rows_per_step=%d gives each its own", deal.copies, processes
                )
            self._restart_clock()
            while progress.step < steps:
                self._take_step()
                progress.step += 1
                is_last = progress.step == steps
                should_evaluate = is_last or progress.step % conf.interval.eval == 0
                should_log = should_evaluate or progress.step % conf.interval.log == 0
                if should_log or saves.is_due(progress.step):
                    # Read the metrics before saving, so that a loss or a gradient that is not finite
                    # ends the run without saving a bad state.
                    self._log_metrics(bar, should_evaluate)
                    saves.read_clock()  # a collective, so only here; it can make a state due
                if is_last or saves.is_due(progress.step):
                    self.run_state.save(self.training_state, self.parallel)
                    saves.restart()
                    self._restart_clock()
        return progress

    def warmup(self) -> None:
        """Take one step, which compiles every graph, and save nothing."""
        with self._prepare_steps():
            self._take_step()

    @contextmanager
    def _prepare_steps(self) -> Iterator[None]:
        """Build what steps need, compute the features to keep, and load the newest state, if there is one.

        The order is: module, optimizers, their wrappers, features, the optimizers' memory, the state. Metrics of
        later steps are dropped. Graphs that are compiled until the block ends are checked against those announced.
        """
        device, optimizers = self.parallel.device, self.training_state.optimizers
        # Accelerate replaces the groups of an optimizer that it wraps, and would copy loaded moments.
        _ = self.wrapped
        needed = graph_plan.list_graphs(self.conf, lazy=device.lazy)
        with device.expect_graphs(needed, log.info), closing(self.step_inputs):
            if self.parallel.is_main:
                drop_later_lines(self.metric_logger.file, after=self.run_state.progress.step)
            if self.conf.data.keep_features:
                self.features.keep_all(self.builder.size)
            device.compile_if_lazy(allocate_optimizer_states)(optimizers)
            self.run_state.load(self.training_state, self.parallel)
            self.parallel.prepare_optimizers(optimizers)
            yield

    def _take_step(self) -> None:
        """Train on the micro-batches of the next step, then step the schedules."""
        device, began = self.parallel.accelerator.device, time.perf_counter()
        micro_batches = next(self.step_inputs)
        self.wait_seconds += time.perf_counter() - began
        # In a dict, because a lazy device tells graphs apart by its tensors, not by a list's.
        self._run_train_step({n: micro_batch.to(device) for n, micro_batch in enumerate(micro_batches)})
        _, schedules = self.wrapped
        for schedule in schedules:
            schedule.step()

    def train_step(self, micro_batches: dict[int, MicroBatch]) -> None:
        """Update the weights by the gradient of the step's loss, and buffer its metrics.

        The loss of a step is its sum over all rows of all processes, divided by its summed weight.
        """
        accelerator = self.parallel.accelerator
        step_extras = self._sum_term_weights([*micro_batches.values()])
        sums: dict[str, Tensor] = {}
        for index, micro_batch in micro_batches.items():
            batch, target_output = micro_batch.batch, self._get_target_output(micro_batch)
            extras = {name: t.to(accelerator.device) for name, t in micro_batch.extras.items()}
            is_last = index == len(micro_batches) - 1
            is_dealt = self.builder.deal.parts > 1
            with nullcontext() if is_last else accelerator.no_sync(self.loss_module), own_rows(is_dealt):
                loss = self.loss_module(batch, target_output, extras | step_extras)
                accelerator.backward(loss.total)
            is_token = batch.document_ids >= 0  # the rest is padding
            in_answer = is_token & batch.answer_mask
            pairs = loss.metrics | {
                "loss": torch.stack([loss.total.detach(), loss.weight]).float(),
                "tokens": torch.stack([is_token.sum(), in_answer.sum()]).float(),
            }
            sums = {name: sums[name] + pair if sums else pair for name, pair in pairs.items()}

        self.parallel.average_gradients(self.trained)
        weight = self.parallel.all_reduce_sum(sums["loss"])[1]
        # Gradients are means over the processes. A step without any answer has weight 0, and no gradient.
        scale = torch.where(weight > 0, accelerator.num_processes / weight, 0.0)
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        norm = full_tensor(cast(Tensor, accelerator.clip_grad_norm_(self.trained, self.conf.optim.max_grad_norm)))
        self.metric_buffer.add(sums | {"grad_norm": torch.stack([norm, torch.ones_like(norm)])})
        optimizers, _ = self.wrapped
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.parallel.frees_gradients)

    def _get_target_output(self, micro_batch: MicroBatch) -> TargetOutput:
        """Return the target's features of a micro-batch, after the passes that the tensor group runs together."""
        target_output = micro_batch.target_output
        if target_output is not None:
            is_pinned = self.parallel.device.reads_pinned_memory
            target_output = target_output.to(self.parallel.accelerator.device, non_blocking=is_pinned)
        # The members of a split target run all passes together, those of other parts too.
        for other in micro_batch.target_passes:
            computed = self.features.compute_features(micro_batch.batch if other is None else other)
            if other is None:
                target_output = computed
        assert target_output is not None  # looked up, or of a pass of its own
        return target_output

    def _sum_term_weights(self, micro_batches: list[MicroBatch]) -> Extras:
        """Return the weights of the loss's terms, if any, as `term_weight_sums`, summed over the step's rows."""
        weights = [m.term_weights for m in micro_batches if m.term_weights is not None]
        if not weights:
            return {}
        return {"term_weight_sums": self.parallel.all_reduce_sum(torch.stack(weights).sum(0))}

    def _log_metrics(self, bar: ProgressBar, should_evaluate: bool) -> None:
        """Write a line of metrics, of the steps since the last one and of the draft; collective."""
        step, clock_start_step = self.run_state.progress.step, self.clock_start_step
        seconds = time.perf_counter() - self.clock_start
        values = self._read_metrics(seconds)
        bar.report(step, values, seconds_per_step=seconds / (step - clock_start_step))
        self._restart_clock()
        line = {f"train/{name}": value for name, value in values.items()}
        self.metric_logger.write(step, line | (self._evaluate_draft() if should_evaluate else {}))

    def _read_metrics(self, seconds: float) -> dict[str, float]:
        """Return the metrics of these seconds; count tokens; collective.

        Raise UserError if a loss is not finite, or a gradient, which makes no weight finite.
        """
        progress, optim = self.run_state.progress, self.conf.optim
        step_sums = self.metric_buffer.read(self.parallel)
        losses = average_by_step(step_sums.pop("loss"), last_step=progress.step)
        average_by_step(step_sums["grad_norm"], last_step=progress.step, quantity="norm of the gradients")
        sums = {name: map(sum, zip(*steps, strict=True)) for name, steps in step_sums.items()}
        tokens, answer_tokens = (count / self.builder.deal.copies for count in sums.pop("tokens"))
        progress.tokens += round(tokens)
        progress.answer_tokens += round(answer_tokens)
        rows_visited = progress.step * optim.rows_per_step
        values = {
            "loss": sum(losses) / len(losses),
            "lr": optim.lr * optim.rate_factor(progress.step - 1, self.steps),  # that of the last step
            **{name: total / max(count, 1) for name, (total, count) in sums.items()},
            "rows": float(rows_visited),
            "tokens": float(progress.tokens),
            "answer_tokens": float(progress.answer_tokens),
            "epochs": rows_visited / len(self.rows),
            "tokens_per_s": tokens / seconds,
            "data_wait": self.wait_seconds / seconds,
        }
        if (tau := chain_acceptance_length(values)) is not None:
            values["teacher_forced_tau"] = tau
        if (graph_budget := self.parallel.device.ledger.budget) is not None:
            values["graphs_unannounced"] = graph_budget.unannounced
        return values

    def _restart_clock(self) -> None:
        """Restart the clock of the training time, which excludes evaluation and saving."""
        self.clock_start, self.clock_start_step = time.perf_counter(), self.run_state.progress.step
        self.wait_seconds = 0.0

    def _evaluate_draft(self) -> dict[str, float]:
        """Measure the draft by `evaluate`, and return the metrics by their `eval/` names; collective.

        Save the draft if it is the best so far, and restart the clock. Return {} on processes that
        do not decode.
        """
        values: dict[str, float] = {}
        with full_params(self.draft, dtype=self.target.device.dtype):  # as checkpoints and engines have them
            if self.parallel.decodes:
                values = self.evaluate(self.draft)
                self._save_if_best(*next(iter(values.items())))
        self.parallel.barrier()
        self._restart_clock()
        return {f"eval/{name}": value for name, value in values.items()}

    def _save_if_best(self, name: str, figure: float) -> None:
        progress = self.run_state.progress
        # Medusa-2 changes the target too. One that collapses to repetition is the easiest to draft
        # for, so tokens per round cannot choose: its last draft is kept.
        is_adapted = self.draft.get_adapted_target(self.target) is not None
        if progress.best is None or figure > progress.best or is_adapted:
            progress.best, progress.best_step = figure, progress.step
            self.draft.save(self.run_state.folder / "checkpoint", self.target, writes=self.parallel.is_main)
        name = name.replace("_", " ")
        log.info(
            "step %d  %s %.3f, best %.3f at step %s", progress.step, name, figure, progress.best, progress.best_step
        )
