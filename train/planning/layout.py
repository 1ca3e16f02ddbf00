"""How the cores of a machine may share a run: what each then holds, and how fast they can be."""

from collections import Counter
from dataclasses import dataclass, replace

from models.device.machine_specs import MachineConf
from models.device.memory_trace import REST, Phase
from models.errors import UserError
from models.meta_model import Outline, head_names
from models.parallel.tensor_parallel import plan as cuts
from train.config import TrainConf
from train.distributed.parallel import ParallelConf, Weights
from train.planning.trace import (
    FROZEN,
    GRADIENTS,
    LEARNS,
    OPTIMIZER,
    SEES,
    STEPS,
    TARGET,
    TRAINED,
    Trace,
)

BUCKETS = "gradient buckets"
PARTS_ONCE = 3  # reads of weight and gradient, write of the weight; moments are read and written


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`tensor` cores hold the target together; `data` such groups read rows of their own."""

    tensor: int
    data: int
    rows: int  # of a micro-batch
    micros: int  # of a step
    blocks: int  # layers of the target, which a sharded one gathers two at a time
    target: Weights = Weights.replicated  # over the groups
    draft: Weights = Weights.replicated  # over all processes

    @property
    def processes(self) -> int:
        return self.tensor * self.data


def layouts(conf: TrainConf, machine: MachineConf, target: Outline) -> list[Layout]:
    """By cores that share the target: the configured number, or else all powers of two that can.

    Raises UserError where the configured one cannot.
    """
    if conf.parallel.tensor > 1:
        check_tensor(conf.parallel, machine, target)
        return [layout(conf, machine, target.num_layers, conf.parallel.tensor)]
    found, tensor = [], 1
    most = 1 if conf.draft.adapts else machine.all_cores  # what is adapted is whole everywhere
    while tensor <= most:
        try:
            check_tensor(replace(conf.parallel, tensor=tensor), machine, target)
        except UserError:
            break
        found.append(layout(conf, machine, target.num_layers, tensor))
        tensor *= 2
    return found


def check_tensor(parallel: ParallelConf, machine: MachineConf, target: Outline) -> None:
    """Raises UserError unless so many cores can hold the target together."""
    tensor = parallel.tensor
    if machine.all_cores % tensor:
        raise UserError(
            f"parallel.tensor: must divide the {machine.all_cores} cores of {machine.name}, "
            f"got {tensor}; choose a divisor"
        )
    if not machine.repeats_heads:
        parallel.check_heads(target.config)
    cuts(target.model, tensor, whole=head_names(target))


def layout(conf: TrainConf, machine: MachineConf, blocks: int, tensor: int) -> Layout:
    """With as many groups as the cores allow and the rows of a step can be dealt to evenly."""
    rows, groups = conf.optim.rows, machine.all_cores // tensor
    data = max(n for n in range(1, groups + 1) if rows % n == 0)
    at_a_time = conf.optim.at_a_time(rows // data)
    return Layout(
        tensor=tensor, data=data, rows=at_a_time, micros=rows // data // at_a_time, blocks=blocks,
        target=conf.parallel.target, draft=conf.parallel.draft,
    )  # fmt: skip


def held(phase: Phase, layout: Layout) -> Counter[str]:
    """Bytes of a core by part, where processes share weights or reduce gradients."""
    parts = phase.held.copy()
    if layout.processes > 1:  # reduced from a copy, whether the draft is sharded or not
        parts[BUCKETS] = parts[TRAINED]
    parts[TARGET] = weights(layout, parts[TARGET])
    if layout.draft is Weights.sharded:
        parts[OPTIMIZER] //= layout.processes
        if phase.name == STEPS:
            for part in (TRAINED, FROZEN, GRADIENTS, BUCKETS, REST):
                parts[part] //= layout.processes
        else:  # gathered for every pass, beside its shards
            for part in (TRAINED, FROZEN):
                parts[part] += parts[part] // layout.processes
    return parts


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of an optimizer step, where nothing but one thing took time."""

    arithmetic: float
    bandwidth: float
    links: float

    @property
    def bound(self) -> float:
        return max(self.arithmetic, self.bandwidth, self.links)


def speed(trace: Trace, layout: Layout, machine: MachineConf) -> Speed:
    """At best: matrix products alone, everything between them fused, no wait for other cores."""
    # of a store's rows, none is seen by the target
    phases = [trace.phases[name] for name in (SEES, LEARNS) if name in trace.phases]
    arithmetic = sum(
        count / machine.core_flops(dtype)
        for phase in phases
        for dtype, count in phase.operations.items()
    )
    moved = sum(phase.moved for phase in phases)
    trained, moments = phases[0].held[TRAINED], phases[0].held[OPTIMIZER]
    stepped = PARTS_ONCE * trained + 2 * moments
    return Speed(
        arithmetic=arithmetic * layout.micros,
        bandwidth=(moved * layout.micros + stepped) / machine.core_bytes_s,
        links=_sent(phases[0], layout) / machine.core_link_bytes_s,
    )


def _sent(phase: Phase, layout: Layout) -> int:
    """Bytes that a core gets of others in a step: weights that it has no whole of, gradients."""
    target, trained = phase.held[TARGET], phase.held[TRAINED]
    sent = 0
    if layout.target is Weights.sharded and phase.name == SEES:
        sent += layout.micros * target
    if layout.draft is Weights.sharded:  # gathered for both passes, reduced once in each batch
        sent += layout.micros * (2 * (phase.held[FROZEN] + trained) + trained)
    elif layout.processes > 1:  # an all-reduce gathers and reduces
        sent += 2 * trained
    return sent


def weights(layout: Layout, whole: int) -> int:
    """Bytes of the target that a core holds, of those that its group has `whole`."""
    if layout.target is Weights.replicated:
        return whole
    return whole // layout.data + 2 * whole // layout.blocks


def fullest(trace: Trace, layout: Layout) -> tuple[str, Counter[str]]:
    """The phase in which a core holds most, and what."""
    name = max(trace.phases, key=lambda name: held(trace.phases[name], layout).total())
    return name, held(trace.phases[name], layout)
