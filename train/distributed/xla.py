"""The processes of a run on the XLA route, which has neither DTensor nor FSDP2.

The target is split by the layers of neuronx-distributed, and a sharded draft by ZeRO-1: its weights and gradients have
the device's precision, and the engine updates this process's fp32 shard of every weight and gathers the weights.
Checkpoints hold full weights and moments in fp32, so that any number of processes can resume, with ZeRO-1 or without.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from models.drafts.registry import find_draft_class
from models.io.errors import UserError, require
from models.parallel.dtensor import keep_full_value
from models.parallel.tensor_parallel import ParallelLayers, list_whole_tables, parallelize_model
from models.targets.loading import load_target
from models.targets.pretrained import load_model
from models.targets.target import Target
from train.config.run import ParallelConf, TrainConf, Weights
from train.distributed.parallel import Parallel
from train.distributed.units import shard_rows


class XlaParallel(Parallel):
    """The processes of a run on the XLA route, whose collectives go over the device."""

    @property
    def data_rank(self) -> int:
        return self._engine.get_data_parallel_rank() if self.is_target_split else super().data_rank

    @property
    def tensor_rank(self) -> int:
        return self._engine.get_tensor_model_parallel_rank() if self.is_target_split else super().tensor_rank

    @cached_property
    def _engine(self) -> Any:
        """Return neuronx-distributed's groups; collective.

        They need not be neighbors: on Trn1, four of 32 processes are 0, 8, 16 and 24.
        """
        _, engine = import_neuronx_distributed(self.conf.tensor_size)
        if not engine.model_parallel_is_initialized():
            engine.initialize_model_parallel(tensor_model_parallel_size=self.conf.tensor_size)
        return engine

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, within the graph being recorded, which Accelerate's reduce would end."""
        if self.is_single_process:
            return values
        from torch_xla.core import xla_model  # pyright: ignore[reportMissingImports]

        return xla_model.all_reduce(xla_model.REDUCE_SUM, values)

    def build_target(self, conf: TrainConf) -> Target:
        """Build the target, its layers split on the host, where the fingerprint and drafts need all weights."""
        if not self.is_target_split:
            return load_target(conf.target, self.device)
        target = load_target(conf.target, self.device, model=load_model(conf.target, self.device.dtype))
        model, reads_head = target.model, find_draft_class(conf.draft).reads_target_head
        tables = [layer.weight for layer in (model.get_input_embeddings(), target.head)]
        whole = list_whole_tables(model, reads_head=reads_head)
        parallelize_model(model, self._parallel_layers(), replicated=whole)
        model.to(self.device.torch_device)
        target.head, target.processes = model.get_output_embeddings(), self.conf.tensor_size
        target.head.joins_ranks = True
        for layer, table in zip((model.get_input_embeddings(), target.head), tables, strict=True):
            if layer.weight.shape != table.shape:
                keep_full_value(layer.weight, table)
        return target

    def _parallel_layers(self) -> ParallelLayers:
        """Return the layer classes of neuronx-distributed, with this process's tensor group."""
        layers, _ = import_neuronx_distributed(self.conf.tensor_size)
        return ParallelLayers(
            ranks=self.conf.tensor_size,
            rank=self.tensor_rank,
            column=layers.ColumnParallelLinear,
            row=layers.RowParallelLinear,
            embedding=layers.ParallelEmbedding,
        )

    def prepare(self, loss_module: nn.Module) -> nn.Module:
        """Return the module for Accelerate to step; frozen weights of a shared draft get the precision of the rest."""
        if self.is_draft_sharded:
            for weight in loss_module.parameters():
                if not weight.requires_grad:  # the others have masters, which are made of them first
                    weight.data = weight.data.to(self.device.dtype)
        return self.accelerator.prepare(loss_module)

    @property
    def frees_gradients(self) -> bool:
        """Return True: the route reduces gradients without DDP."""
        return True

    @property
    def builds_draft_on_host(self) -> bool:
        return False

    def average_gradients(self, weights: list[nn.Parameter]) -> None:
        """Average a sharded draft's gradients in fp32, as Accelerate would in the type of the weights; collective."""
        if not self.is_draft_sharded:
            return
        for gradient in (weight.grad for weight in weights if weight.grad is not None):
            gradient.copy_(self.all_reduce_sum(gradient.float()) / self.accelerator.num_processes)
        self.accelerator.gradient_state.is_xla_gradients_synced = True  # else Accelerate averages them again

    @property
    def adamw_class(self) -> Callable[..., AdamW]:
        return ShardedAdamW if self.is_draft_sharded else AdamW

    def prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Shard moments and masters. Call it after loading states and before the first step."""
        for optimizer in filter_sharded(optimizers):
            from torch_xla.core import xla_model  # pyright: ignore[reportMissingImports]
            from torch_xla.distributed import zero_redundancy_optimizer as zero  # pyright: ignore[reportMissingImports]

            optimizer.shard_moments(
                zero.ZeroRedundancyOptimizer,
                partial(xla_model.all_gather, pin_layout=False),
                ranks=self.accelerator.num_processes,
                rank=self.accelerator.process_index,
                dtype=self.device.dtype,
            )
            self.device.synchronize()  # keeps the sharding out of the first step's graph

    @contextmanager
    def full_moments(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """Hold full weights in fp32, and their moments in the optimizers' `state`, for the block; collective.

        The engine keeps the shards throughout, so dropping these loses nothing. After an error, which ends the run,
        they are not dropped.
        """
        sharded = filter_sharded(optimizers)
        for optimizer in sharded:
            optimizer.gather_state()
        yield
        for optimizer in sharded:
            optimizer.drop_state()


def check_xla_layout(conf: ParallelConf) -> None:
    """Raise UserError for layouts that neuronx-distributed does not support."""
    require(
        conf.target is not Weights.sharded,
        "parallel.target: must be replicated with device=xla, got sharded; split its layers by parallel.tensor",
    )
    require(not conf.split_heads, "parallel.split_heads: must be false with device=xla, got true; leave it out")


def import_neuronx_distributed(ranks: int) -> tuple[Any, Any]:
    """Return neuronx-distributed's `layers` and `parallel_state` modules; raise UserError without them."""
    try:
        from neuronx_distributed.parallel_layers import layers, parallel_state  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "parallel.tensor: must be 1 without neuronx-distributed, which splits the target with "
            f"device=xla, got {ranks} and {error}; run scripts/setup_trn1.sh"
        ) from None
    return layers, parallel_state


class ShardedAdamW(AdamW):
    """AdamW whose moments and masters an engine holds from `shard_moments` on.

    `state` has the moments, and the weights are fp32, in `full_moments` alone.
    """

    engine: Any = None
    gather: Callable[[Tensor], Tensor]
    dtype: torch.dtype  # of the weights from then on

    def shard_moments(
        self,
        engine_class: Callable[..., Any],
        gather: Callable[[Tensor], Tensor],
        *,
        ranks: int,
        rank: int,
        dtype: torch.dtype,
    ) -> None:
        """Build the engine, which takes all further steps, and move moments and masters to it, sharded."""
        options = {name: self.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.gather, self.dtype = gather, dtype
        # The groups are shared, so that schedules still set the learning rate. The engine sums the gradients of all
        # processes, which are equal by now, once more: in bf16 the sum would not be their multiple.
        self.engine = engine_class(
            self.param_groups,
            AdamW,
            grad_clipping=False,
            pin_layout=False,
            save_master_weights=True,
            higher_cc_precision=True,
            **options,
        )
        for weight, shard in self._weight_shard_pairs():
            if moments := self.state.pop(weight, None):
                self.engine.base_optimizer.state[shard] = {
                    name: shard_rows(value, ranks=ranks, rank=rank).to(shard.device).clone()
                    if value.ndim
                    else value.cpu()  # the step counter
                    for name, value in moments.items()
                }
        self.drop_state()

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.engine is None else self.engine.step(closure)

    def gather_state(self) -> None:
        """Fill the weights with their masters, and `state` with their moments, on the host; collective."""
        for weight, shard in self._weight_shard_pairs():
            weight.data = self.gather(shard.detach())[: len(weight)]
            self.state[weight] = {
                name: self.gather(value)[: len(weight)].cpu() if value.ndim else value.cpu()
                for name, value in self.engine.base_optimizer.state[shard].items()
            }

    def drop_state(self) -> None:
        """Leave weights in their type alone."""
        self.state.clear()
        for weight, _ in self._weight_shard_pairs():
            weight.data = weight.data.to(self.dtype)

    def _weight_shard_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with this process's shard of it."""
        shard_groups = self.engine.base_optimizer.param_groups
        for weights, shards in zip(self.param_groups, shard_groups, strict=True):
            yield from zip(weights["params"], shards["params"], strict=True)


def filter_sharded(optimizers: list[Optimizer]) -> list[ShardedAdamW]:
    return [optimizer for optimizer in optimizers if isinstance(optimizer, ShardedAdamW)]
