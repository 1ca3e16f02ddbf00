"""Plan a run on a machine, layout by layout."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.config import CaptureConf, DataSource
from data.features.manifest import Manifest, read_manifest
from data.features.schema import FeatureSchema, build_schema
from models.device.config import MachineConf
from models.device.memory_trace import TracedPhase
from models.drafts.base import Draft
from models.meta_model import MetaTarget, build_meta_draft, build_meta_target, shard_target
from models.parallel.tensor_parallel import list_head_layers, list_whole_tables
from train.config.optim import AUTO
from train.config.run import ParallelConf, TrainConf, TrainPlanConf, Weights
from train.planning.fake_process import persistent_memory
from train.planning.graph_plan import list_graphs
from train.planning.layout import ProcessLayout
from train.planning.step_time import estimate_step_time
from train.planning.trace import trace_run


@dataclass(kw_only=True)
class LayoutOption:
    """A layout, with its memory and step time if it was traced."""

    layout: ProcessLayout
    persistent: Counter[str]  # bytes of a process by part, in every step
    phases: dict[str, TracedPhase] = field(default_factory=dict)  # empty if it was not traced
    step_time: dict[str, float] = field(default_factory=dict)  # seconds by limit, if it was traced

    @property
    def memory_by_phase(self) -> dict[str, Counter[str]]:
        """Return the bytes per core by part, at the fullest moment of each phase."""
        return {name: phase.peak_bytes for name, phase in self.phases.items()} or {"every step": self.persistent}

    @property
    def peak_bytes(self) -> int:
        """Return the bytes per core at the fullest moment; without a trace, a lower bound."""
        return max(parts.total() for parts in self.memory_by_phase.values())


@dataclass(kw_only=True)
class MachinePlan:
    """Needs of a run on a machine, by layout."""

    conf: TrainPlanConf
    machine: MachineConf
    dtype: torch.dtype
    options: list[LayoutOption]
    choices: list[str] = field(default_factory=list)  # overrides that the run left to its plan, beside parallel.tensor
    remedy: dict[str, Any] | None = None  # overrides with which it fits, once searched for: a search takes seconds

    @cached_property
    def models(self) -> tuple[MetaTarget, Draft]:
        """Return target and draft, whole, for what does not depend on the layout."""
        return build_models(self.conf, self.dtype)

    @cached_property
    def feature_bytes(self) -> int:
        """Return the bytes of a token's features, as a store has them or would have them."""
        target, draft = self.models
        if (store := read_store(self.conf, target, draft)) is not None:
            return round(store.total_bytes / store.spec.tokens)
        if draft.needs.storable:
            return default_schema(self.conf, target, draft).num_bytes(1, 1)
        return (1 + len(draft.needs.layers)) * target.hidden_size * target.device.dtype.itemsize

    @property
    def byte_limit(self) -> float:
        """Return the bytes per core that a run may take."""
        return (1 - self.conf.memory_margin) * self.machine.core_bytes

    def fits(self, option: LayoutOption) -> bool:
        return bool(option.phases) and option.peak_bytes <= self.byte_limit

    @property
    def best(self) -> LayoutOption:
        """Return the fastest option that fits, of equals that of the fewest cores, or the smallest if none fits."""
        fitting = [option for option in self.options if self.fits(option)]
        if not fitting:
            return min(self.options, key=lambda option: (not option.phases, option.peak_bytes))
        return min(fitting, key=lambda option: (max(option.step_time.values()), option.layout.tensor))

    def trace_layout(self, option: LayoutOption, conf: TrainPlanConf) -> LayoutOption:
        """Return the option with the traced memory and step time of its layout; auto takes the most rows that fit."""
        traced = self._trace_rows(option, conf)
        while conf.optim.micro_batch_size == AUTO and not self.fits(traced) and traced.layout.rows > 1:
            # As many rows as fit if all that a step adds grows with them.
            layout, held = traced.layout, traced.persistent.total()
            rows = layout.count_fitting_rows(layout.rows * (self.byte_limit - held) / max(traced.peak_bytes - held, 1))
            fewer = replace(layout, rows=rows, micros=layout.rows * layout.micros // rows)
            traced = self._trace_rows(replace(traced, layout=fewer), conf)
        return traced

    def _trace_rows(self, option: LayoutOption, conf: TrainPlanConf) -> LayoutOption:
        layout = option.layout
        target, draft = build_models(conf, self.dtype, layout.tensor)
        schema = None
        if conf.data.source is DataSource.captured:
            store = read_store(conf, target, draft)
            schema = default_schema(conf, target, draft) if store is None else store.spec.schema
        phases = trace_run(
            conf,
            target,
            draft,
            layout,
            accelerator=self.machine.is_accelerator,
            scores_in_memory=self.machine.scores_in_memory,
            prompt_tokens=min(conf.prompt_tokens or conf.data.row_length, conf.data.row_length),
            stored_schema=schema,
        )
        step_time = estimate_step_time(
            phases,
            layout,
            self.machine,
            held=option.persistent,
            target_bytes=sum(parameter.nbytes for parameter in target.model.parameters()),
            row_bytes=conf.data.row_length * target.hidden_size * self.dtype.itemsize,
        )
        return replace(option, phases=phases, step_time=step_time)


def build_option(conf: TrainPlanConf, dtype: torch.dtype, layout: ProcessLayout) -> LayoutOption:
    """Return the option of a layout that is not traced."""
    persistent = persistent_memory(conf, *build_models(conf, dtype, layout.tensor), layout)
    return LayoutOption(layout=layout, persistent=persistent)


def plan_layouts(
    conf: TrainPlanConf, machine: MachineConf, dtype: torch.dtype, layouts: list[ProcessLayout]
) -> MachinePlan:
    """Return a plan that traces these layouts in order, up to one that uses all cores and fits."""
    options = [build_option(conf, dtype, layout) for layout in layouts]
    plan = MachinePlan(conf=conf, machine=machine, dtype=dtype, options=options)
    for index, option in enumerate(options):
        if option.peak_bytes <= plan.byte_limit:
            options[index] = plan.trace_layout(option, conf)
        if plan.fits(options[index]) and option.layout.processes == machine.total_cores:
            break  # splitting the target further adds only sums, or repeats more of the draft's work
    return plan


def count_graphs(plan: MachinePlan) -> int:
    """Count the graphs that a process of the proposed layout compiles before the evaluation."""
    conf, layout = plan.conf, plan.best.layout
    optim = replace(conf.optim, micro_batch_size=layout.rows)
    parallel = ParallelConf(tensor=layout.tensor, target=layout.target)
    planned = replace(conf, optim=optim, parallel=parallel)
    return len(list_graphs(planned, lazy=not conf.device.is_native, processes=layout.processes))


def read_store(conf: TrainPlanConf, target: MetaTarget, draft: Draft) -> Manifest | None:
    """Return the manifest of the run's store, or None if there is none yet.

    Raise UserError if the store was captured from a target of a different shape or lacks features.
    """
    if conf.data.path is None or conf.data.source is not DataSource.captured:
        return None
    folder = Path(conf.data.path)
    manifest = read_manifest(folder)
    manifest.check_serves(folder, needs=draft.needs, hidden_size=target.hidden_size)
    return manifest


def default_schema(conf: TrainPlanConf, target: MetaTarget, draft: Draft) -> FeatureSchema:
    """Return the schema of the store that `data.capture` would write for the run by its defaults."""
    capture = CaptureConf(draft=conf.draft, data=conf.data, on_prompts=conf.loss.on_prompts, run_name="")
    return build_schema(capture, draft.needs, hidden_size=target.hidden_size, vocab_size=target.vocab_size)


def build_models(conf: TrainConf, dtype: torch.dtype, tensor: int = 1) -> tuple[MetaTarget, Draft]:
    """Build target and draft as one core holds them if `tensor` cores share the target."""
    target = build_meta_target(conf.target, dtype)
    draft = build_meta_draft(conf.draft, target, loss=conf.loss, seed=conf.seed)
    if not conf.measure:
        target.decoder.layers = nn.ModuleList()
    if tensor > 1:
        is_native, is_whole = conf.device.is_native, conf.parallel.target is not Weights.sharded
        if is_native:
            whole = [] if is_whole and not draft.reads_target_head else list_head_layers(target.model)
        else:
            whole = list_whole_tables(target.model, reads_head=draft.reads_target_head)
        shard_target(target, tensor, replicated=whole, is_native=is_whole and is_native)
    return target, draft
