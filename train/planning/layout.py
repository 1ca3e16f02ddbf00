"""Layouts of a run over the cores of a machine: memory per core, and the best step time."""

from collections import Counter
from dataclasses import dataclass, replace

from models.device.config import MachineConf
from models.device.machine_specs import core_flops
from models.device.memory_trace import ACTIVATIONS, TracedPhase
from models.io.errors import UserError, require
from models.meta_model import MetaTarget
from models.parallel.tensor_parallel import check_heads, plan_shards
from train.config.optim import AUTO
from train.config.run import ParallelConf, TrainConf, Weights
from train.distributed.build import HEADS_REMEDY
from train.distributed.deal import RowDeal, deal_rows
from train.planning.trace import (
    DRAFT_PASS,
    EVALUATION,
    FROZEN,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    TARGET,
    TARGET_PASS,
    TRAINED,
)

WEIGHT_PASSES = 3  # a step reads weight and gradient and writes the weight
MOMENT_PASSES = 2  # and reads and writes each moment


@dataclass(frozen=True, kw_only=True)
class ProcessLayout:
    """Layout of processes: `data` groups with rows of their own; the `tensor` cores of each share the target."""

    tensor: int
    data: int
    deal: RowDeal  # of the rows of a group
    rows: int  # of a micro-batch
    micros: int  # of a step
    blocks: int  # layers of the target; a sharded target gathers two at a time
    target: Weights = Weights.replicated  # over the groups
    draft: Weights = Weights.replicated  # over all processes
    is_native: bool = True  # as `DeviceConf.is_native`

    @property
    def processes(self) -> int:
        return self.tensor * self.data

    @property
    def gathers_draft(self) -> bool:
        """Return whether processes share the draft's weights, and each gathers them for a pass."""
        return self.draft is Weights.sharded and self.is_native and self.processes > 1

    def with_rows(self, rows: int) -> "ProcessLayout":
        """Return the layout with that many rows per pass, which must divide those of a process."""
        return replace(self, rows=rows, micros=self.rows * self.micros // rows)

    def count_fitting_rows(self, most: float) -> int:
        """Return the rows per pass, fewer than now and at most `most`, at least one, that divide those of a process."""
        rows = self.rows * self.micros
        sizes = [size for size in range(1, self.rows) if rows % size == 0 and size <= most]
        return max(sizes, default=1)

    def split_rows(self, conf: TrainConf) -> TrainConf:
        """Return the config of a run of one process, with only its share of the rows per step."""
        optim = replace(conf.optim, rows_per_step=self.rows * self.micros, micro_batch_size=self.rows)
        return replace(conf, optim=optim)


def list_layouts(conf: TrainConf, machine: MachineConf, target: MetaTarget) -> list[ProcessLayout]:
    """Return a layout for each power of two of cores that can share the target, or for a configured number alone.

    Raise UserError if that many cores cannot share it.
    """
    if conf.parallel.tensor != AUTO:
        check_tensor_size(conf.parallel, machine, target)
        return [build_layout(conf, machine, target.num_layers, conf.parallel.tensor_size)]
    layouts = []
    # A target that is trained is whole on every process, and one without layers has nothing to share.
    largest = 1 if conf.draft.trains_target or not conf.measure else machine.total_cores
    for tensor in (2**power for power in range(largest.bit_length())):
        try:
            check_tensor_size(replace(conf.parallel, tensor=tensor), machine, target)
        except UserError:
            break
        layouts.append(build_layout(conf, machine, target.num_layers, tensor))
    return layouts


def check_tensor_size(parallel: ParallelConf, machine: MachineConf, target: MetaTarget) -> None:
    """Raise UserError if `parallel.tensor` cores cannot hold the target together."""
    tensor = parallel.tensor_size
    if tensor == 1:
        return  # one core holds any target, also one that cannot be split
    require(
        machine.total_cores % tensor == 0,
        f"parallel.tensor: must divide the {machine.total_cores} cores of {machine.name}, "
        f"got {tensor}; choose a divisor",
    )
    if not machine.repeats_heads:
        check_heads(tensor, target.config, remedy=HEADS_REMEDY)
    experts = parallel.target is not Weights.sharded and not machine.repeats_heads
    plan_shards(target.model, tensor, splits_experts=experts)


def build_layout(conf: TrainConf, machine: MachineConf, blocks: int, tensor: int) -> ProcessLayout:
    """Build the layout with the most groups that fit the cores and share a step's rows evenly."""
    rows, groups = conf.optim.rows_per_step, machine.total_cores // tensor
    data = max(n for n in range(1, groups + 1) if rows % n == 0)
    deal = deal_rows(conf, groups=data, tensor=tensor)
    micro_rows, placement = conf.optim.micro_batch_rows(deal.rows), conf.parallel.settle()
    return ProcessLayout(
        tensor=tensor,
        data=data,
        deal=deal,
        rows=micro_rows,
        micros=deal.rows // micro_rows,
        blocks=blocks,
        target=placement.target,
        draft=placement.draft,
        is_native=conf.device.is_native,
    )


def core_memory(phase: TracedPhase, layout: ProcessLayout) -> Counter[str]:
    """Return the bytes per core by part, of a phase that was traced without other processes."""
    parts = phase.peak_bytes.copy()
    if layout.target is Weights.sharded:  # over the groups; two layers at a time are gathered
        parts[TARGET] = parts[TARGET] // layout.data + 2 * parts[TARGET] // layout.blocks
    if layout.draft is Weights.sharded:
        parts[OPTIMIZER] //= layout.processes
    if layout.gathers_draft:
        for part in (TRAINED, FROZEN):
            shard = parts[part] // layout.processes
            # An evaluation gathers all weights as they are.
            parts[part] = parts[part] + shard if phase.name == EVALUATION else shard
        if phase.name == OPTIMIZER_STEP:
            for part in (GRADIENTS, ACTIVATIONS):
                parts[part] //= layout.processes
        elif layout.micros > 1 and phase.name != EVALUATION:  # of an earlier micro-batch
            parts[GRADIENTS] += parts[TRAINED]
    elif layout.processes > 1 and layout.is_native:  # DDP's buckets, which stay, are the gradients
        parts[GRADIENTS] = parts[TRAINED]
    return parts


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step if only one limit applied, for each limit."""

    arithmetic: float
    bandwidth: float
    links: float

    @property
    def bound(self) -> float:
        return max(self.arithmetic, self.bandwidth, self.links)


def estimate_step_time(
    traced: dict[str, TracedPhase], layout: ProcessLayout, machine: MachineConf, *, row_bytes: int
) -> StepTime:
    """Estimate the best case: only matrix products count, the rest is fused, no core waits.

    `row_bytes` are those of the hidden state of a row.
    """
    # With a feature store there is no target pass.
    passes = {name: layout.micros for name in (TARGET_PASS, DRAFT_PASS) if name in traced}
    if TARGET_PASS in passes:
        passes[TARGET_PASS] *= layout.deal.parts
    arithmetic = sum(
        count * flops / core_flops(machine, dtype)
        for name, count in passes.items()
        for dtype, flops in traced[name].flops_by_dtype.items()
    )
    moved = sum(count * traced[name].bytes_moved for name, count in passes.items())
    held = traced[DRAFT_PASS].peak_bytes
    stepped = WEIGHT_PASSES * held[TRAINED] + MOMENT_PASSES * held[OPTIMIZER]
    if layout.gathers_draft:
        stepped //= layout.processes
    return StepTime(
        arithmetic=arithmetic,
        bandwidth=(moved + stepped) / machine.core_bandwidth,
        links=_bytes_received(traced[DRAFT_PASS], layout, target_passes=passes.get(TARGET_PASS, 0), row_bytes=row_bytes)
        / machine.core_link_bandwidth,
    )


def _bytes_received(learning: TracedPhase, layout: ProcessLayout, *, target_passes: int, row_bytes: int) -> int:
    """Return the bytes that a core receives in a step: parts of weights, sums of a split target, and gradients.

    `learning` is the draft's pass. An all-reduce gathers and reduces.
    """
    trained = learning.peak_bytes[TRAINED]
    # A ring passes all of a sum but this core's own part, and each layer has two sums.
    summed = 2 * layout.blocks * layout.rows * row_bytes * (layout.tensor - 1) // layout.tensor
    received = target_passes * 2 * summed
    if layout.target is Weights.sharded:
        received += target_passes * learning.peak_bytes[TARGET]
    if layout.gathers_draft:  # gathered and reduced once per micro-batch
        received += layout.micros * (learning.peak_bytes[GATHERED] + trained)
    elif layout.processes > 1:
        received += 2 * trained
    return received
