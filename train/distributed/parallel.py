"""The processes of a run: the rows that each of them reads, and the weights that it holds.

    process = data rank * tensor + tensor rank, so that a tensor group lies within a node

The frozen target is replicated on every process, or its layers are split over the `tensor`
processes of a group by the model's own plan, or sharded over the data ranks (FSDP2), or both. The
draft is replicated on every process (DDP) or sharded over all of them (FSDP2).

The processes of a tensor group read the same rows with the same random numbers, so the mean of the
gradients over all processes equals their mean over the data ranks. One reduction over all processes
gives every copy of the draft the same gradient, to the last bit, so the copies never diverge.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from models.device import Device, DeviceName
from models.drafts.base import Draft
from models.errors import UserError
from models.parallel import tensor_parallel
from models.parallel.dtensor import full_params
from models.target.language_model import ModelSource
from models.target.target import Target, TargetConf
from train.distributed import torchrun
from train.distributed.zero1 import ShardedAdamW

MIN_TORCH = "2.13"  # for DTensor and FSDP2; the rest runs on the lower bound of pyproject.toml
COLLECTIVE_TIMEOUT = timedelta(hours=6)  # ranks wait while rank 0 answers prompts or evaluates


class Weights(Enum):
    """The placement of weights: a full copy on each data rank, or a part."""

    replicated = "replicated"
    sharded = "sharded"


@dataclass(kw_only=True)
class ParallelConf:
    """The placement of target and draft on the processes."""

    tensor: int = 1  # processes that the target's layers are split over
    target: Weights = Weights.replicated  # over the data ranks
    draft: Weights = Weights.replicated  # over all processes

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise UserError(f"parallel.tensor: must be at least 1, got {self.tensor}")

    @property
    def splits_target(self) -> bool:
        """Return True if several processes hold one copy of the target."""
        return self.tensor > 1 or self.target is Weights.sharded

    def check(
        self, *, rows: int, trains_target: bool,
        device: DeviceName = DeviceName.auto, optimizer: str = "adamw",
    ) -> None:  # fmt: skip
        """Check what does not depend on the target; raise UserError otherwise."""
        torchrun.check_launch()
        processes = torchrun.get_world_size()
        if processes % self.tensor:
            raise UserError(
                f"parallel.tensor: must divide the {processes} processes, got {self.tensor}; "
                "launch a multiple of it or lower it"
            )
        data_ranks = processes // self.tensor
        if rows % data_ranks:
            raise UserError(
                f"optim.accumulation: the rows of a step, optim.batch_size x optim.accumulation, "
                f"must be a multiple of the {data_ranks} data-parallel processes, got {rows}; "
                f"give {data_ranks} rows or a multiple of that"
            )
        if trains_target and (self.splits_target or self.draft is Weights.sharded):
            raise UserError(
                "parallel: a draft that adapts its target needs both whole on every process, got "
                f"tensor={self.tensor}, target={self.target.name}, draft={self.draft.name}; "
                "leave parallel at its defaults or choose another draft"
            )
        if device is DeviceName.xla:
            self._check_xla(optimizer)
        elif self.splits_target or self.draft is Weights.sharded:
            self._check_torch_version()

    def check_target(self, target: TargetConf, *, device: DeviceName = DeviceName.auto) -> None:
        """Check without weights that the target can be split; raise UserError otherwise."""
        if self.tensor == 1:
            return
        if device is DeviceName.xla:
            tensor_parallel.plan_shards(target.build_meta_model(), self.tensor)
        else:
            self.check_heads(target.read_config().get_text_config())

    def _check_xla(self, optimizer: str) -> None:
        """Refuse what neuronx-distributed and ZeRO-1 cannot do in place of DTensor and FSDP2."""
        if self.target is Weights.sharded:
            raise UserError(
                "parallel.target: must be replicated with device=xla, got sharded; "
                "split its layers by parallel.tensor"
            )
        if self.draft is Weights.sharded and optimizer != "adamw":
            raise UserError(
                f"optim.name: must be adamw with device=xla and parallel.draft=sharded, got "
                f"{optimizer}, which needs whole matrices; set parallel.draft=replicated"
            )

    def _check_torch_version(self) -> None:
        """Check the version: sharded training failed with torch 2.9; 2.10 to 2.12 are untested."""
        if torch.__version__ < f"{MIN_TORCH}.dev0":  # containers come with pre-releases: 2.13.0a0
            raise UserError(
                f"parallel: tensor and sharded need torch {MIN_TORCH} or newer, got "
                f"{torch.__version__}; upgrade torch, or set parallel=data"
            )

    def check_heads(self, config: Any) -> None:
        """Check that DTensor can split a model of this config; raise UserError otherwise."""
        for heads, kind in (
            (config.num_key_value_heads, "key-value heads"),
            (config.num_attention_heads, "attention heads"),
        ):
            if heads % self.tensor:
                raise UserError(
                    f"parallel.tensor: must divide the target's {heads} {kind}, "
                    f"got {self.tensor}; lower it, or set parallel.target=sharded"
                )

    def build(self, device: Device, *, trackers: list[str]) -> "Parallel":
        if self.tensor > 1 and device.name == "xla":
            import_neuronx_distributed(self.tensor)  # raises UserError early if it is missing
        return Parallel(
            conf=self, device=device, accelerator=build_accelerator(device, trackers=trackers)
        )


def build_accelerator(device: Device, *, trackers: list[str]) -> Accelerator:
    """Build an Accelerator with the device's mixed precision; master weights stay fp32."""
    # A sweep runs several configs in one process, and Accelerate would refuse a second precision.
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
    if accelerator.device.type != device.torch_device.type:
        raise UserError(
            f"device.name: Accelerate trains on {accelerator.device.type} here, got {device.name}; "
            "where torch_xla is installed, set USE_TORCH_XLA=0 to leave it alone"
        )
    return accelerator


def import_neuronx_distributed(ranks: int) -> tuple[Any, Any]:
    """Import the layers and groups of neuronx-distributed; raise UserError if that fails."""
    try:
        from neuronx_distributed.parallel_layers import (  # pyright: ignore[reportMissingImports]
            layers,
            parallel_state,
        )
    except ImportError as error:
        raise UserError(
            "parallel.tensor: with device=xla a target is split by neuronx-distributed, got "
            f"{ranks} where it cannot be imported ({error}); run scripts/setup_trn1.sh, or use "
            "parallel.tensor=1"
        ) from None
    return layers, parallel_state


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

        A split target needs all ranks, so all run it.
        """
        return self.is_main or self.is_target_split

    @property
    def is_target_split(self) -> bool:
        return self.conf.splits_target and not self.is_single_process

    @property
    def compiles_loss(self) -> bool:
        """Return True if the loss is compiled as a graph of its own.

        On lazy devices the whole step is one graph already; and the collectives that gather the
        head of a sharded target cannot be compiled.
        """
        return not self.device.lazy and (
            self.is_single_process or self.conf.target is Weights.replicated
        )

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

    def barrier_if_split(self) -> None:
        """Wait for all processes if they hold the target together."""
        if self.is_target_split:
            self.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block on the main process first; at once everywhere if the target is split."""
        if self.is_target_split or self.is_single_process:
            yield
        else:
            with self.accelerator.main_process_first():
                yield

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes."""
        if self.is_single_process:
            return values
        if self.device.lazy:  # Accelerate's reduce would end the graph that is being recorded
            from torch_xla.core import xla_model  # pyright: ignore[reportMissingImports]

            return xla_model.all_reduce(xla_model.REDUCE_SUM, values)
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    # --- the target ---------------------------------------------------------------------------

    def build_target(self, conf: TargetConf) -> Target:
        """Build the target, with all weights or this process's part of them."""
        if not self.is_target_split:
            return conf.build(self.device)
        if self.device.name == "xla":
            return self._build_xla_target(conf)
        target = conf.build(self.device, load_model=self._load_part)
        return target.eager()  # graphs of sharded tensors break at every collective

    def _load_part(self, source: ModelSource) -> Any:
        """Load this process's part of the weights, and no other."""
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
        model = source.load_model(self.device.dtype, distributed_config=mesh_config)
        del model.config.distributed_config  # else drafts that copy the config would be split, too
        text_config = model.config.get_text_config()
        model.key_value_heads = text_config.num_key_value_heads // self.conf.tensor
        return model

    def _build_xla_target(self, conf: TargetConf) -> Target:
        """Load the full target on the host, for its fingerprint and tables, and split it there."""
        target = conf.build(
            self.device, load_model=lambda source: source.load_model(self.device.dtype)
        )
        tables = (target.model.get_input_embeddings(), target.head)
        names = [name for name, layer in target.model.named_modules() if layer in tables]
        tensor_parallel.parallelize_model(target.model, self._parallel_layers(), replicated=names)
        target.model.to(self.device.torch_device)
        return target

    def _parallel_layers(self) -> tensor_parallel.ParallelLayers:
        """Return the layer classes of neuronx-distributed, with this process's tensor group."""
        layers, engine = import_neuronx_distributed(self.conf.tensor)
        if not engine.model_parallel_is_initialized():
            engine.initialize_model_parallel(tensor_model_parallel_size=self.conf.tensor)
        if engine.get_data_parallel_rank() != self.data_rank:  # Trn2 has rings (0..15, 48..63)
            raise UserError(
                "parallel.tensor: neuronx-distributed must group neighboring processes, got other "
                f"groups for {self.conf.tensor} on this instance; choose another parallel.tensor"
            )
        return tensor_parallel.ParallelLayers(
            ranks=self.conf.tensor,
            rank=engine.get_tensor_model_parallel_rank(),
            column=layers.ColumnParallelLinear,
            row=layers.RowParallelLinear,
            embedding=layers.ParallelEmbedding,
        )

    # --- the draft ----------------------------------------------------------------------------

    def prepare(self, loss_module: nn.Module) -> nn.Module:
        """Average the module's gradients over all processes. Call it before building optimizers."""
        if self.conf.draft is Weights.replicated or self.is_single_process or self.shards_moments:
            return self.accelerator.prepare(loss_module)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One FSDP unit, because methods read weights outside of the modules that hold them.
        mesh = init_device_mesh(self.device.torch_device.type, (self.accelerator.num_processes,))
        fully_shard(loss_module.to(self.accelerator.device), mesh=mesh)
        return self.accelerator.prepare_model(loss_module, evaluation_mode=True)  # without DDP

    @property
    def shards_moments(self) -> bool:
        """Return True if only the draft's moments are sharded: ZeRO-1, where there is no FSDP2."""
        return (
            self.conf.draft is Weights.sharded
            and self.device.name == "xla"
            and not self.is_single_process
        )

    @property
    def adamw_class(self) -> type[AdamW]:
        return ShardedAdamW if self.shards_moments else AdamW

    def prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Shard the moments for ZeRO-1. Call it after loading states and before the first step."""
        for optimizer in optimizers:
            if isinstance(optimizer, ShardedAdamW):
                from torch_xla.core import xla_model  # pyright: ignore[reportMissingImports]
                from torch_xla.distributed import (  # pyright: ignore[reportMissingImports]
                    zero_redundancy_optimizer as zero,
                )

                optimizer.shard_moments(
                    zero.ZeroRedundancyOptimizer, partial(xla_model.all_gather, pin_layout=False),
                    ranks=self.accelerator.num_processes, rank=self.accelerator.process_index,
                )  # fmt: skip
                self.device.synchronize()  # keeps the sharding out of the first step's graph

    @contextmanager
    def full_moments(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """Gather the moments of full weights while the context is open."""
        sharded = [optimizer for optimizer in optimizers if isinstance(optimizer, ShardedAdamW)]
        for optimizer in sharded:
            optimizer.gather_moments()
        yield
        for optimizer in sharded:
            optimizer.free_moments()

    def full_weights(self, draft: Draft) -> AbstractContextManager[None]:
        """Gather all weights of the draft on every process while the context is open."""
        return full_params(draft)
