"""The processes of a run: the rows that each of them reads, and the weights that it holds.

    process = data rank * tensor + tensor rank, so that a tensor group lies within a node

The frozen target is replicated on every process, or its layers are split over the `tensor`
processes of a group by the model's own plan, or sharded over the data ranks (FSDP2), or both. The
draft is replicated on every process (DDP) or sharded over all of them (FSDP2).

The processes of a tensor group read the same rows with the same random numbers, so the mean of the
gradients over all processes equals their mean over the data ranks. One reduction over all processes
gives every copy of the draft the same gradient, to the last bit, so the copies never diverge.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, release_memory
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from models.device.config import DeviceName
from models.device.device import Device
from models.errors import require
from models.parallel.tensor_parallel import plan_shards
from models.target.config import ModelSource, TargetConf
from models.target.pretrained import build_meta_model, load_model, load_target, read_model_config
from models.target.target import Target
from train.config.parallel import ParallelConf, Weights
from train.distributed import torchrun

MIN_TORCH = "2.13"  # for DTensor and FSDP2; the rest runs on the lower bound of pyproject.toml
COLLECTIVE_TIMEOUT = timedelta(hours=6)  # ranks wait while rank 0 answers prompts or evaluates


def check_parallel(
    conf: ParallelConf, *, rows: int, trains_target: bool,
    device: DeviceName = DeviceName.auto, optimizer: str = "adamw",
) -> None:  # fmt: skip
    """Raise UserError for a setting that cannot work, whatever the target."""
    torchrun.check_launch()
    processes = torchrun.get_world_size()
    require(
        processes % conf.tensor == 0,
        f"parallel.tensor: must divide the {processes} processes, got {conf.tensor}; "
        "launch a multiple of it or lower it",
    )
    data_ranks = processes // conf.tensor
    require(
        rows % data_ranks == 0,
        f"optim.rows_per_step: must be a multiple of the {data_ranks} data-parallel processes, "
        f"got {rows}; give {data_ranks} rows or a multiple of that",
    )
    check_layout(conf, trains_target=trains_target, device=device, optimizer=optimizer)
    if device is not DeviceName.xla and shards_weights(conf):
        # Splitting failed with torch 2.9; 2.10 to 2.12 are untested.
        require(  # .dev0 admits the pre-releases of containers, such as 2.13.0a0
            torch.__version__ >= f"{MIN_TORCH}.dev0",
            f"parallel: tensor and sharded need torch {MIN_TORCH} or newer, got "
            f"{torch.__version__}; upgrade torch, or set parallel=data",
        )


def shards_weights(conf: ParallelConf) -> bool:
    """Return whether target or draft are not whole on every process."""
    return conf.splits_target or conf.draft is Weights.sharded


def check_layout(
    conf: ParallelConf, *, trains_target: bool, device: DeviceName, optimizer: str
) -> None:
    """Raise UserError for a layout that the draft or the device's route cannot train in."""
    require(
        not (trains_target and shards_weights(conf)),
        "parallel: a draft that adapts its target needs both whole on every process, got "
        f"tensor={conf.tensor}, target={conf.target.name}, draft={conf.draft.name}; "
        "leave parallel at its defaults or choose another draft",
    )
    if device is DeviceName.xla:
        from train.distributed import xla  # imported late, because it imports this module

        xla.check_xla_layout(conf, optimizer)


def check_target_split(
    conf: ParallelConf, target: TargetConf, *, device: DeviceName = DeviceName.auto
) -> None:
    """Raise UserError if the target cannot be split. No weights are loaded."""
    if conf.tensor == 1:
        return
    if device is DeviceName.xla:
        plan_shards(build_meta_model(target), conf.tensor)
    else:
        check_heads(conf, read_model_config(target).get_text_config())


def check_heads(conf: ParallelConf, config: Any) -> None:
    """Raise UserError if DTensor cannot split a model of this config."""
    for heads, kind in (
        (config.num_key_value_heads, "key-value heads"),
        (config.num_attention_heads, "attention heads"),
    ):
        require(
            heads % conf.tensor == 0,
            f"parallel.tensor: must divide the target's {heads} {kind}, "
            f"got {conf.tensor}; lower it, or set parallel.target=sharded",
        )


def build_parallel(conf: ParallelConf, device: Device, *, trackers: list[str]) -> "Parallel":
    """Build the processes of the device's route; raise UserError if it cannot train."""
    parallel_class = Parallel
    if device.name == "xla":
        from train.distributed import xla

        parallel_class = xla.XlaParallel
        if conf.tensor > 1:
            xla.import_neuronx_distributed(conf.tensor)  # early, before anything is loaded
    return parallel_class(
        conf=conf, device=device, accelerator=build_accelerator(device, trackers=trackers)
    )


def build_accelerator(device: Device, *, trackers: list[str]) -> Accelerator:
    """Build an Accelerator with the device's mixed precision; master weights stay fp32."""
    # A sweep runs several configs in one process, and Accelerate would reject a second precision.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16" if device.dtype is torch.bfloat16 else "no",
        cpu=device.torch_device.type == "cpu",
        log_with=[*trackers] or None,
        kwargs_handlers=[
            InitProcessGroupKwargs(
                init_method=torchrun.rendezvous_url(), timeout=COLLECTIVE_TIMEOUT
            ),
            # Else DDP would rebuild its gradient buckets after the first step, and a resumed run
            # would sum gradients in another order.
            DistributedDataParallelKwargs(find_unused_parameters=True),
        ],
        step_scheduler_with_optimizer=False,  # else schedules run ahead by the number of processes
    )
    require(
        accelerator.device.type == device.torch_device.type,
        f"device.name: Accelerate trains on {accelerator.device.type} here, got {device.name}; "
        "if torch_xla is installed, set USE_TORCH_XLA=0 to leave it alone",
    )
    return accelerator


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
        """Return True if this process runs the target for work that is needed only once.

        That is the main process, but a split target needs all processes.
        """
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

    def any_rank(self, condition: bool) -> bool:
        """Return True if the condition holds on any process; collective."""
        if self.is_single_process:
            return condition
        flag = torch.tensor(float(condition), device=self.accelerator.device)
        return bool(cast(Tensor, self.accelerator.reduce(flag, "sum")))

    def all_ranks_agree(self, number: int) -> bool:
        """Return True if `number` is the same on all processes; collective."""
        if self.is_single_process:
            return True
        numbers = torch.tensor([number], device=self.accelerator.device)
        return len(cast(Tensor, self.accelerator.gather(numbers)).unique()) == 1

    def min_over_ranks(self, number: float) -> float:
        """Return the smallest `number` of all processes; collective."""
        if self.is_single_process:
            return number
        numbers = torch.tensor([number], device=self.accelerator.device)
        return float(cast(Tensor, self.accelerator.gather(numbers)).min())

    def main_first(self) -> AbstractContextManager[None]:
        """Return a context whose block runs on the main process before the others.

        With a split target, which needs all processes, it runs on all of them at once.
        """
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
        """Return the module, set up to average its gradients over all processes.

        This may replace its parameters with shards, so build optimizers afterwards.
        """
        if self.conf.draft is Weights.replicated or self.is_single_process:
            return self.accelerator.prepare(loss_module)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One FSDP unit, because some drafts read a module's weights without calling its forward.
        mesh = init_device_mesh(self.device.torch_device.type, (self.accelerator.num_processes,))
        fully_shard(loss_module.to(self.accelerator.device), mesh=mesh)
        return self.accelerator.prepare_model(loss_module, evaluation_mode=True)  # without DDP

    def free_training_memory(self) -> None:
        """Free what training took, once its caller holds nothing of it.

        Accelerate keeps all that it has prepared, and schedules and optimizers refer to each other.
        """
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
        """Return a context in which each optimizer's `state` has all that a saved state needs.

        Here it always has: torch.distributed.checkpoint saves DTensor shards as they are.
        """
        return nullcontext()
