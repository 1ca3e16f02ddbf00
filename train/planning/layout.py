"""Layouts of a run over the cores of a machine."""

from dataclasses import dataclass, replace

from models.device.config import MachineConf
from models.io.errors import UserError, require
from models.meta_model import MetaTarget
from models.parallel.tensor_parallel import check_heads, plan_shards
from train.config.optim import AUTO
from train.config.run import ParallelConf, TrainConf, Weights
from train.distributed.build import HEADS_REMEDY
from train.distributed.deal import RowDeal, deal_rows


@dataclass(frozen=True, kw_only=True)
class ProcessLayout:
    """Layout of processes: `data` groups with rows of their own; the `tensor` cores of each share the target."""

    tensor: int
    data: int
    deal: RowDeal  # of the rows of a group
    rows: int  # of a micro-batch
    micros: int  # of a step
    blocks: int  # layers of the target
    target: Weights = Weights.replicated  # over the groups
    draft: Weights = Weights.replicated  # over all processes
    split_heads: bool = False  # each process keeps rows of the draft's heads, which nobody gathers
    is_native: bool = True  # as `DeviceConf.is_native`

    @property
    def processes(self) -> int:
        return self.tensor * self.data

    @property
    def gathers_draft(self) -> bool:
        """Return whether processes share the draft's weights, and each gathers them for a pass."""
        return self.draft is Weights.sharded and self.is_native and self.processes > 1

    @property
    def shards_target(self) -> bool:
        """Return whether groups share the target's weights, and each gathers a layer for its pass."""
        return self.target is Weights.sharded and self.data > 1

    @property
    def shards_moments(self) -> bool:
        """Return whether processes share the optimizer's moments alone, as with ZeRO-1."""
        return self.draft is Weights.sharded and not self.is_native and self.processes > 1

    @property
    def has_buckets(self) -> bool:
        """Return whether gradients are DDP's buckets, which stay."""
        return self.draft is not Weights.sharded and self.is_native and self.processes > 1

    def count_fitting_rows(self, most: float) -> int:
        """Return the rows per pass, fewer than now and at most `most`, at least one, that divide those of a process."""
        rows = self.rows * self.micros
        sizes = [size for size in range(1, self.rows) if rows % size == 0 and size <= most]
        return max(sizes, default=1)


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
    plan_shards(target.model, tensor, is_native=experts)


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
        split_heads=placement.split_heads and tensor * data > 1,
        is_native=conf.device.is_native,
    )
