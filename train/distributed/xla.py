"""The processes of a run on the XLA route, which has neither DTensor nor FSDP2.

The target is split by the layers of neuronx-distributed, and a sharded draft by ZeRO-1, whose engine reduces
gradients, updates this process's shard of every weight and gathers the weights. Checkpoints hold the moments of full
weights, so that any number of processes can resume, with ZeRO-1 or without.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from models.io.errors import UserError, require
from models.parallel.tensor_parallel import ParallelLayers, list_tables, parallelize_model
from models.targets.config import TargetConf
from models.targets.loading import load_target
from models.targets.pretrained import load_model
from models.targets.target import Target
from train.config.run import ParallelConf, Weights
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

    def build_target(self, conf: TargetConf) -> Target:
        """Build the target, its layers split on the host, where the fingerprint and the tables need all weights."""
        if not self.is_target_split:
            return load_target(conf, self.device)
        target = load_target(conf, self.device, load_part=lambda source: load_model(source, self.device.dtype))
        parallelize_model(target.model, self._parallel_layers(), replicated=list_tables(target.model))
        target.model.to(self.device.torch_device)
        target.processes = self.conf.tensor_size
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
        return self.accelerator.prepare(loss_module)

    @property
    def frees_gradients(self) -> bool:
        """Return True: the route reduces gradients without DDP."""
        return True

    @property
    def adamw_class(self) -> Callable[..., AdamW]:
        sharded = self.conf.draft is Weights.sharded and not self.is_single_process
        return ShardedAdamW if sharded else AdamW

    def prepare_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Shard the moments. Call it after loading states and before the first step."""
        for optimizer in filter_sharded(optimizers):
            from torch_xla.core import xla_model  # pyright: ignore[reportMissingImports]
            from torch_xla.distributed import zero_redundancy_optimizer as zero  # pyright: ignore[reportMissingImports]

            optimizer.shard_moments(
                zero.ZeroRedundancyOptimizer,
                partial(xla_model.all_gather, pin_layout=False),
                ranks=self.accelerator.num_processes,
                rank=self.accelerator.process_index,
            )
            self.device.synchronize()  # keeps the sharding out of the first step's graph

    @contextmanager
    def full_moments(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """Hold the moments of full weights in the optimizers' `state` for the block; collective.

        The engine keeps the shards throughout, so clearing `state` loses nothing. After an
        error, which ends the run, `state` is not cleared.
        """
        sharded = filter_sharded(optimizers)
        for optimizer in sharded:
            optimizer.gather_state()
        yield
        for optimizer in sharded:
            optimizer.state.clear()


def check_xla_layout(conf: ParallelConf, optimizer: str) -> None:
    """Raise UserError for layouts that neuronx-distributed and ZeRO-1 do not support."""
    require(
        conf.target is not Weights.sharded,
        "parallel.target: must be replicated with device=xla, got sharded; split its layers by parallel.tensor",
    )
    require(
        conf.draft is not Weights.sharded or optimizer == "adamw",
        f"optim.name: must be adamw with device=xla and parallel.draft=sharded, got "
        f"{optimizer}, which needs whole matrices; set parallel.draft=replicated",
    )


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
    """AdamW whose moments an engine holds from `shard_moments` on; `state` has them in `full_moments` alone."""

    engine: Any = None
    gather: Callable[[Tensor], Tensor]

    def shard_moments(
        self, engine_class: Callable[..., Any], gather: Callable[[Tensor], Tensor], *, ranks: int, rank: int
    ) -> None:
        """Build the engine, which takes all further steps, and move the moments to it, sharded."""
        options = {name: self.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.gather = gather
        # The groups are shared, so that schedules still set the learning rate.
        self.engine = engine_class(
            self.param_groups, AdamW, grad_clipping=False, pin_layout=False, save_master_weights=True, **options
        )
        for weight, shard in self._weight_shard_pairs():
            if moments := self.state.pop(weight, None):
                self.engine.base_optimizer.state[shard] = {
                    name: shard_rows(value, ranks=ranks, rank=rank).to(shard.device).clone()
                    if value.ndim
                    else value.cpu()  # the step counter
                    for name, value in moments.items()
                }

    def step(self, closure: Any = None) -> Any:
        return super().step(closure) if self.engine is None else self.engine.step(closure)

    def gather_state(self) -> None:
        """Fill `state` with the moments of full weights, on the host; collective."""
        for weight, shard in self._weight_shard_pairs():
            self.state[weight] = {
                name: self.gather(value)[: len(weight)].cpu() if value.ndim else value.cpu()
                for name, value in self.engine.base_optimizer.state[shard].items()
            }

    def _weight_shard_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with this process's shard of it."""
        shard_groups = self.engine.base_optimizer.param_groups
        for weights, shards in zip(self.param_groups, shard_groups, strict=True):
            yield from zip(weights["params"], shards["params"], strict=True)


def filter_sharded(optimizers: list[Optimizer]) -> list[ShardedAdamW]:
    return [optimizer for optimizer in optimizers if isinstance(optimizer, ShardedAdamW)]
