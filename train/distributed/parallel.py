"""The processes of a run: the rows that each of them reads, and the weights that it holds.

    process = data rank * tensor + tensor rank, so that a tensor group lies within a node

The target's layers may be split over the `tensor` processes of a group by the model's own plan, and sharded over the
data ranks (FSDP2); the draft is replicated (DDP) or sharded over all processes (FSDP2). A tensor group reads the same
rows with the same random numbers, so the mean of the gradients over all processes is that over the data ranks. One
reduction over all of them gives every copy of the draft the same gradient, to the last bit.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from models.device.device import Device
from models.targets.config import ModelSource, TargetConf
from models.targets.loading import load_target
from models.targets.pretrained import load_model
from models.targets.target import Target
from train.config.run import ParallelConf, Weights


@dataclass(kw_only=True)
class Parallel:
    """The processes of a run. Accelerate handles devices and precision; PyTorch shards."""

    conf: ParallelConf
    device: Device
    accelerator: Accelerator

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def is_single_process(self) -> bool:
        return self.accelerator.num_processes == 1

    @property
    def num_data_ranks(self) -> int:
        """Return the number of tensor groups, which read different rows."""
        return self.accelerator.num_processes // self.conf.tensor

    @property
    def data_rank(self) -> int:
        """Return the index of this process's tensor group."""
        return self.accelerator.process_index // self.conf.tensor

    @property
    def runs_target(self) -> bool:
        """Return True if this process runs the target for work needed once: the main one, all if it is split."""
        return self.is_main or self.is_target_split

    @property
    def is_target_split(self) -> bool:
        return self.conf.splits_target and not self.is_single_process

    @property
    def compiles_loss(self) -> bool:
        """Return True unless the loss gathers a sharded target's head, which cannot be compiled."""
        return self.is_single_process or self.conf.target is Weights.replicated

    def barrier(self) -> None:
        if not self.is_single_process:  # on XLA it would cost a graph, even for one process
            self.accelerator.wait_for_everyone()

    def gather(self, number: float | int) -> list[float]:
        """Return the `number` of every process; collective."""
        if self.is_single_process:
            return [float(number)]
        numbers = torch.tensor([float(number)], device=self.accelerator.device)
        return cast(Tensor, self.accelerator.gather(numbers)).tolist()

    def main_first(self) -> AbstractContextManager[None]:
        """Return a context whose block runs on the main process first; on all at once with a split target."""
        if self.is_target_split or self.is_single_process:
            return nullcontext()
        return self.accelerator.main_process_first()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all processes; collective."""
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    # --- the target ---------------------------------------------------------------------------

    def build_target(self, conf: TargetConf) -> Target:
        """Build the target, with all weights or this process's part of them."""
        if not self.is_target_split:
            return load_target(conf, self.device)
        # Eager: graphs of sharded tensors break at every collective.
        return load_target(conf, self.device, load_part=self._load_part).eager()

    def _load_part(self, source: ModelSource) -> Any:
        """Load the model with only this process's part of the weights."""
        from transformers.distributed.configuration_utils import DistributedConfig

        sharded = self.conf.target is Weights.sharded

        class MeshConfig(DistributedConfig):
            @property
            def dp_size(self) -> int:
                """Return 1 without sharding, or transformers would wrap replicas in FSDP."""
                return super().dp_size if sharded else 1

        mesh_config = MeshConfig(
            tp_size=self.conf.tensor,
            fsdp_size=self.num_data_ranks if sharded else 1,
            dp_replicate_size=1 if sharded else self.num_data_ranks,
        )
        model = load_model(source, self.device.dtype, distributed_config=mesh_config)
        del model.config.distributed_config  # else drafts that copy the config would be split, too
        text_config = model.config.get_text_config()
        model.key_value_heads = text_config.num_key_value_heads // self.conf.tensor
        return model

    # --- the draft ----------------------------------------------------------------------------

    def prepare(self, loss_module: nn.Module) -> nn.Module:
        """Return the module, set up to average gradients; it may shard parameters, so build optimizers afterwards."""
        if self.conf.draft is Weights.replicated or self.is_single_process:
            return self.accelerator.prepare(loss_module)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One FSDP unit, because some drafts read a module's weights without calling its forward.
        mesh = init_device_mesh(self.device.torch_device.type, (self.accelerator.num_processes,))
        fully_shard(loss_module.to(self.accelerator.device), mesh=mesh)
        return self.accelerator.prepare_model(loss_module, evaluation_mode=True)  # without DDP

    def free_training_memory(self) -> None:
        """Free what training took and Accelerate keeps, once its caller holds nothing of it."""
        self.accelerator.free_memory()
        release_memory()  # `free_memory` collects garbage before it lets go

    @property
    def adamw_class(self) -> type[AdamW]:
        return AdamW

    def prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Shard the moments if FSDP2 does not. Call it between loading and the first step."""

    def full_moments(
        self,
        optimizers: list[Optimizer],  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Return a context in which each optimizer's `state` has all that a saved state needs, as here always."""
        return nullcontext()
