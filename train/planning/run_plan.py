"""Plan a run on a machine, layout by layout."""

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from data.features import compatibility
from data.features.manifest import Manifest
from models.device.machine_specs import LOCAL_MACHINE, MachineConf
from models.device.memory_trace import TracedPhase
from models.drafts.base import Draft
from models.errors import UserError
from models.meta_model import (
    MetaTarget,
    build_meta_draft,
    build_meta_target,
    find_head_layers,
    shard_target,
)
from train.config import TrainConf
from train.distributed.parallel import ParallelConf, Weights
from train.planning.graph_plan import list_graphs
from train.planning.layout import (
    ProcessLayout,
    StepTime,
    core_memory,
    estimate_step_time,
    find_peak_phase,
    list_layouts,
)
from train.planning.trace import TARGET, MemoryTrace, persistent_memory, trace_run
from train.run_dir import disk_bytes_needed, trained_parameters


@dataclass(kw_only=True)
class RunPlan(TrainConf):
    """Configuration of a run, and of the machine to plan it for."""

    machine: MachineConf = field(default_factory=MachineConf)
    headroom: float = 0.1  # share of a core's memory for compiler, runtime, collectives
    prompt_tokens: int | None = None  # of the longest held-out prompt; null = a whole row
    tokens: float | None = None  # of the data set; null = what the steps of the run read

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.headroom < 1:
            raise UserError(f"headroom: is a share and must lie in 0..1, got {self.headroom}")
        for name in ("prompt_tokens", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: must be at least 1, got {value}")

    @property
    def longest_prompt(self) -> int:
        return min(self.prompt_tokens or self.data.length, self.data.length)


@dataclass(kw_only=True)
class LayoutOption:
    """A layout, with its memory and step time where it was traced."""

    layout: ProcessLayout
    persistent: TracedPhase  # memory of its processes in every step
    memory_trace: MemoryTrace | None = None
    step_time: StepTime | None = None

    @property
    def min_bytes(self) -> int:
        """Return the bytes of a core that every step takes."""
        return core_memory(self.persistent, self.layout).total()

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of a core at its fullest moment; without a trace, a lower bound."""
        return (
            find_peak_phase(self.memory_trace, self.layout)[1].total()
            if self.memory_trace
            else self.min_bytes
        )


@dataclass(kw_only=True)
class ModelSizes:
    """Sizes that do not depend on the layout."""

    target: int  # parameters
    draft: int  # parameters
    trained: int  # parameters
    layers: list[int]  # captured layers of the target
    feature_bytes: int  # of a token, as the method needs them or as the store holds them
    disk: int  # bytes of states and checkpoints


@dataclass(kw_only=True)
class MachinePlan:
    """Needs of a run on a machine, by layout."""

    conf: RunPlan
    machine: MachineConf
    dtype: torch.dtype
    sizes: ModelSizes
    options: list[LayoutOption]

    @property
    def byte_limit(self) -> float:
        """Return the bytes of a core that a run may take."""
        return (1 - self.conf.headroom) * self.machine.core_bytes

    def fits(self, option: LayoutOption) -> bool:
        return option.memory_trace is not None and option.peak_bytes <= self.byte_limit

    @property
    def best(self) -> LayoutOption:
        """Return the fastest option that fits, or the smallest if none fits.

        Among equally fast options, prefer the fewest cores per target.
        """
        fitting = [option for option in self.options if self.fits(option)]
        if fitting:
            return min(
                fitting,
                key=lambda option: (
                    option.step_time.bound if option.step_time else 0,
                    option.layout.tensor,
                ),
            )
        return min(
            self.options, key=lambda option: (option.memory_trace is None, option.peak_bytes)
        )


def plan_run(conf: RunPlan) -> MachinePlan:
    """Plan all layouts of a run; raise UserError for what no layout can do."""
    conf.check_settings()
    dtype = conf.machine.target_dtype(conf.device)
    machine = conf.machine.resolve(conf.device)
    machine.check_dtype(dtype)
    machine.check_length(conf.data.length)
    return _build_plan(conf, machine, dtype)


def _build_plan(conf: RunPlan, machine: MachineConf, dtype: torch.dtype) -> MachinePlan:
    target, draft = _build_models(conf, dtype)
    store = compatibility.read_store_manifest(conf.data, target, draft)
    if store is not None and conf.tokens is None:
        conf = replace(conf, tokens=float(store.made.tokens))
    layouts, sizes = (
        list_layouts(conf, machine, target),
        _measure_sizes(target, draft, store, num_states=conf.num_states),
    )
    persistent = persistent_memory(conf, target, draft)
    plan = MachinePlan(
        conf=conf,
        machine=machine,
        dtype=dtype,
        sizes=sizes,
        options=[
            LayoutOption(
                layout=layout, persistent=_with_target_share(persistent, conf, dtype, layout.tensor)
            )
            for layout in layouts
        ],
    )
    for option in plan.options:
        if option.min_bytes <= plan.byte_limit:
            trace_layout(option, conf, machine, dtype)
        if plan.fits(option) and option.layout.processes == machine.total_cores:
            break  # splitting the target further only repeats more of the draft's work
    return plan


def count_graphs(plan: MachinePlan) -> int:
    """Count the graphs that a process of the proposed layout compiles before the evaluation."""
    conf, layout = plan.conf, plan.best.layout
    split = layout.tensor > 1 or layout.target is Weights.sharded
    parallel = ParallelConf(target=Weights.sharded if split else Weights.replicated)
    optim = replace(conf.optim, batch_size=layout.rows, accumulation=layout.micros)
    return len(list_graphs(replace(conf, parallel=parallel, optim=optim)))


def _build_models(conf: RunPlan, dtype: torch.dtype, tensor: int = 1) -> tuple[MetaTarget, Draft]:
    target = build_meta_target(conf.target, dtype)
    draft = build_meta_draft(conf.draft, target, loss=conf.loss, seed=conf.seed)
    if tensor > 1:
        shard_target(target, tensor, replicated=find_head_layers(target))
    return target, draft


def _measure_sizes(
    target: MetaTarget, draft: Draft, store: Manifest | None, *, num_states: int
) -> ModelSizes:
    values = (1 + len(draft.needs.layers)) * target.hidden_size
    computed = values * target.device.dtype.itemsize
    return ModelSizes(
        target=target.num_parameters,
        draft=sum(p.numel() for p in draft.parameters()),
        trained=sum(p.numel() for p in trained_parameters(draft)),
        layers=draft.needs.layers,
        feature_bytes=computed if store is None else round(store.total_bytes / store.made.tokens),
        disk=disk_bytes_needed(draft, target, num_states=num_states),
    )


def _with_target_share(
    persistent: TracedPhase, conf: RunPlan, dtype: torch.dtype, tensor: int
) -> TracedPhase:
    """Replace the target's weights by the part that one of `tensor` cores holds."""
    target = build_meta_target(conf.target, dtype)
    if tensor > 1:
        shard_target(target, tensor, replicated=find_head_layers(target))
    weights = sum(p.nbytes for p in target.model.parameters())
    return replace(persistent, peak_bytes=Counter({**persistent.peak_bytes, TARGET: weights}))


def trace_layout(
    option: LayoutOption, conf: RunPlan, machine: MachineConf, dtype: torch.dtype
) -> None:
    """Trace a run of this layout, and set its memory and step time."""
    layout = option.layout
    optim = replace(conf.optim, batch_size=layout.rows, accumulation=layout.micros)
    target, draft = _build_models(conf, dtype, layout.tensor)
    store = compatibility.read_store_manifest(conf.data, target, draft)
    option.memory_trace = trace_run(
        replace(conf, optim=optim), target, draft, prompt_tokens=conf.longest_prompt,
        foreach=machine.name != LOCAL_MACHINE, stored_schema=store and store.made.layout,
    )  # fmt: skip
    option.step_time = estimate_step_time(option.memory_trace, layout, machine)
