"""The processes of a run: the rows that each of them reads, and the weights that it holds.

    process = data rank * tensor + tensor rank, so that a tensor group lies within a node (XLA has groups of its own)

The target's layers may be split over the `tensor` processes of a group by the model's own plan, and sharded over the
data ranks (FSDP2); the draft is replicated (DDP) or sharded over all processes (FSDP2). A tensor group runs the target
over its rows together, and its members learn them in equal parts (train/distributed/deal.py). One reduction over all
processes gives every copy of the draft the same gradient, to the last bit.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from models.device.device import Device
from models.drafts.loss import LossModule
from models.io.errors import UserError
from models.targets.loading import load_split_target, load_target
from models.targets.target import Target
from train.config.run import ParallelConf, TrainConf, Weights
from train.distributed.units import shard_in_units

T = TypeVar("T")


@dataclass(kw_only=True)
class Parallel:
    """The processes of a run. Accelerate handles devices and precision; PyTorch shards."""

    conf: ParallelConf
    device: Device
    accelerator: Accelerator
    host_group: Any = None  # the process group of what goes over the host; None is the default one

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def is_single_process(self) -> bool:
        return self.accelerator.num_processes == 1

    @property
    def num_data_ranks(self) -> int:
        """Return the number of tensor groups, which read different rows."""
        return self.accelerator.num_processes // self.conf.tensor_size

    @property
    def data_rank(self) -> int:
        """Return the index of this process's tensor group."""
        return self.accelerator.process_index // self.conf.tensor_size

    @property
    def tensor_rank(self) -> int:
        """Return the index of this process in its tensor group."""
        return self.accelerator.process_index % self.conf.tensor_size

    @property
    def decodes(self) -> bool:
        """Return whether this process decodes in measurements: the main one, all if the target is split."""
        return self.is_main or self.is_target_split

    @property
    def is_target_split(self) -> bool:
        return self.conf.splits_target and not self.is_single_process

    @property
    def is_draft_sharded(self) -> bool:
        return self.conf.draft is Weights.sharded and not self.is_single_process

    @property
    def builds_draft_on_host(self) -> bool:
        """Return whether `prepare` moves a draft to the device unit by unit, since no device need hold all of it."""
        return self.is_draft_sharded

    @property
    def compiles_loss(self) -> bool:
        """Return True unless the loss gathers a sharded target's head, which cannot be compiled."""
        return self.is_single_process or self.conf.target is not Weights.sharded

    def barrier(self) -> None:
        """Wait for all processes, on the host: the device's queue goes on."""
        self.gather(0)

    def gather(self, number: float | int) -> list[float]:
        """Return the `number` of every process, by way of the host; collective."""
        if self.is_single_process:
            return [float(number)]
        numbers = torch.zeros(self.accelerator.num_processes, 1, dtype=torch.float64)
        dist.all_gather([*numbers], torch.tensor([number], dtype=torch.float64), group=self.host_group)
        return numbers.flatten().tolist()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the main process first; on all at once with a split target."""
        takes_turns = not self.is_target_split
        if takes_turns and not self.is_main:
            self.barrier()
        yield
        if takes_turns and self.is_main:
            self.barrier()

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Return to all processes what the main one computes, or raise its UserError; collective."""
        if self.is_single_process:
            return function()
        results: list[Any] = [None]
        if self.is_main:
            try:
                results = [function()]
            except UserError as error:
                results = [error]
        dist.broadcast_object_list(results, group=self.host_group)
        if isinstance(results[0], UserError):
            raise results[0]
        return results[0]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all processes; collective."""
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    # --- the target ---------------------------------------------------------------------------

    def build_target(self, conf: TrainConf) -> Target:
        """Build the target, with all weights or this process's part of them."""
        if not self.is_target_split:
            return load_target(conf.target, self.device)
        tensor, ranks = self.conf.tensor_size, self.num_data_ranks
        replicas, shards = (1, ranks) if self.conf.target is Weights.sharded else (ranks, 1)
        return load_split_target(conf.target, self.device, tensor=tensor, replicas=replicas, shards=shards)

    # --- the draft ----------------------------------------------------------------------------

    def prepare(self, loss_module: nn.Module) -> nn.Module:
        """Return the module, set up to average gradients; it may shard parameters, so build optimizers afterwards."""
        if not self.is_draft_sharded:
            prepared = self.accelerator.prepare(loss_module)
            if isinstance(prepared, DistributedDataParallel):
                settle_buckets(prepared)
            return prepared
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.device.torch_device.type, (self.accelerator.num_processes,))
        heads = cast(LossModule, loss_module).draft.list_loss_heads() if self.conf.split_heads else []
        shard_in_units(loss_module, mesh, dtype=self.device.dtype, split_heads=heads)
        return self.accelerator.prepare_model(loss_module, evaluation_mode=True)  # without DDP

    def average_gradients(self, weights: list[nn.Parameter]) -> None:
        """Average the gradients where neither DDP, FSDP2 nor Accelerate does so in fp32; collective."""

    @property
    def frees_gradients(self) -> bool:
        """Return whether a step leaves no gradients: those of DDP are its buckets, which stay."""
        return self.is_single_process or self.conf.draft is Weights.sharded

    def free_training_memory(self) -> None:
        """Free what training took and Accelerate keeps, once its caller holds nothing of it."""
        self.accelerator.free_memory()
        release_memory()  # `free_memory` collects garbage before it lets go

    def end(self) -> None:
        """Wait for all processes, and destroy their group.

        What holds the group goes first, such as DDP: a thread of gloo that is left at the exit aborts the process.
        """
        self.barrier()
        self.free_training_memory()
        self.accelerator.end_training()

    @property
    def adamw_class(self) -> Callable[..., AdamW]:
        return partial(AdamW, fused=True) if self.device.fuses_adamw else AdamW

    def prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Shard the moments if FSDP2 does not. Call it between loading and the first step."""

    def full_moments(self, optimizers: list[Optimizer]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which each optimizer's `state` has all that a saved state needs, as here always."""
        return nullcontext()


def settle_buckets(module: DistributedDataParallel) -> None:
    """Let DDP order its buckets of gradients by a backward pass before the first step; collective.

    DDP orders them once, after its first backward pass. Were that a step, a resumed run would sum the gradients of
    another step in the first order. DDP leaves out the ordering if it searches for unused parameters,
    but the search takes pinned memory and a reduction of its own, and no draft has such parameters.
    """
    module.reducer.prepare_for_backward([])
    torch.autograd.backward([p.sum() for p in module.parameters() if p.requires_grad])
    module.reducer._rebuild_buckets()
    module.zero_grad(set_to_none=False)
