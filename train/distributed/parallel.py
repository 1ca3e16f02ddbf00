"""How a run is spread over processes: who reads which rows, and who holds which weights.

    process = data rank * tensor + tensor rank, so that a tensor group lies within a node

The frozen target is whole on every process, or its layers are split over the `tensor` processes of
a group by the model's own plan, or sharded over the data ranks (FSDP2), or both. The draft is whole
on every process (DDP) or sharded over all of them (FSDP2).

The processes of a tensor group read the same rows with the same random numbers, so the mean of the
gradients over all processes is their mean over the data ranks. One reduction over all of them gives
every copy of the draft the same gradient, to the last bit, and keeps the copies the same.
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
from models.parallel.dtensor import gathered
from models.target.language_model import Source
from models.target.target import Target, TargetConf
from train.distributed import torchrun
from train.distributed.zero1 import SpreadAdamW

LEAST_TORCH = "2.13"  # for DTensor and FSDP2; all else runs on the lower bound of pyproject.toml
PATIENCE = timedelta(hours=6)  # others wait while the main process answers prompts or evaluates


class Weights(Enum):
    """Whether each data rank holds all of them or a part."""

    replicated = "replicated"
    sharded = "sharded"


@dataclass(kw_only=True)
class ParallelConf:
    """How many processes hold the target together, and what they hold of target and draft."""

    tensor: int = 1  # processes that the target's layers are split over
    target: Weights = Weights.replicated  # over the data ranks
    draft: Weights = Weights.replicated  # over all processes

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise UserError(f"parallel.tensor: must be at least 1, got {self.tensor}")

    @property
    def splits_target(self) -> bool:
        """Whether several processes hold one copy of the target."""
        return self.tensor > 1 or self.target is Weights.sharded

    def check(
        self, *, rows: int, adapts: bool,
        device: DeviceName = DeviceName.auto, optimizer: str = "adamw",
    ) -> None:  # fmt: skip
        """Refuse what the launched processes cannot do, whatever the target is."""
        torchrun.check()
        processes = torchrun.launched()
        if processes % self.tensor:
            raise UserError(
                f"parallel.tensor: must divide the {processes} processes, got {self.tensor}; "
                "launch a multiple of it or lower it"
            )
        data = processes // self.tensor
        if rows % data:
            raise UserError(
                f"optim.accumulation: the rows of a step, optim.batch_size x optim.accumulation, "
                f"must be a multiple of the {data} data-parallel processes, got {rows}; "
                f"give {data} rows or a multiple of that"
            )
        if adapts and (self.splits_target or self.draft is Weights.sharded):
            raise UserError(
                "parallel: a draft that adapts its target needs both whole on every process, got "
                f"tensor={self.tensor}, target={self.target.name}, draft={self.draft.name}; "
                "leave parallel at its defaults or choose another draft"
            )
        if device is DeviceName.xla:
            self._check_older_engines(optimizer)
        elif self.splits_target or self.draft is Weights.sharded:
            self._check_torch()

    def check_target(self, target: TargetConf, *, device: DeviceName = DeviceName.auto) -> None:
        """Refuse, before weights are read, a target that cannot be split so."""
        if self.tensor == 1:
            return
        if device is DeviceName.xla:
            tensor_parallel.plan(target.source.shape(), self.tensor)
        else:
            self.check_heads(target.source.config().get_text_config())

    def _check_older_engines(self, optimizer: str) -> None:
        """What neuronx-distributed and ZeRO-1 cannot do, which stand in for DTensor and FSDP2."""
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

    def _check_torch(self) -> None:
        """Training on cut weights failed with PyTorch 2.9; 2.10 to 2.12 were not tried."""
        if torch.__version__ < f"{LEAST_TORCH}.dev0":  # containers come with pre-releases: 2.13.0a0
            raise UserError(
                f"parallel: tensor and sharded need torch {LEAST_TORCH} or newer, got "
                f"{torch.__version__}; upgrade torch, or set parallel=data"
            )

    def check_heads(self, config: Any) -> None:
        """Raises UserError unless DTensor can split a model of this config."""
        for heads, what in (
            (config.num_key_value_heads, "key-value heads"),
            (config.num_attention_heads, "attention heads"),
        ):
            if heads % self.tensor:
                raise UserError(
                    f"parallel.tensor: must divide the target's {heads} {what}, "
                    f"got {self.tensor}; lower it, or set parallel.target=sharded"
                )

    def build(self, device: Device, *, trackers: list[str]) -> "Parallel":
        if self.tensor > 1 and device.name == "xla":
            parallel_engine(self.tensor)  # said now if it is not there
        return Parallel(
            conf=self, device=device, accelerator=accelerator_for(device, trackers=trackers)
        )


def accelerator_for(device: Device, *, trackers: list[str]) -> Accelerator:
    """Mixed precision follows the device; masters stay fp32 either way."""
    # A sweep runs several configs in one process, and Accelerate would refuse a second precision.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16" if device.dtype is torch.bfloat16 else "no",
        cpu=device.torch_device.type == "cpu",
        log_with=[*trackers] or None,
        kwargs_handlers=[
            InitProcessGroupKwargs(init_method=torchrun.meeting_place(), timeout=PATIENCE),
            # Else DDP would deal gradients to new buckets after its first step, and a continued run
            # would add them up in another order.
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


def parallel_engine(ranks: int) -> tuple[Any, Any]:
    """Layers and groups of neuronx-distributed. Raises UserError where it cannot be imported."""
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
    """The processes of a run. Accelerate launches, places and casts; PyTorch shards."""

    conf: ParallelConf
    device: Device
    accelerator: Accelerator

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def alone(self) -> bool:
        return self.accelerator.num_processes == 1

    @property
    def data(self) -> int:
        """Processes, or groups of them, that read different rows."""
        return self.accelerator.num_processes // self.conf.tensor

    @property
    def rank(self) -> int:
        """Which of them this process is, or belongs to."""
        return self.accelerator.process_index // self.conf.tensor

    @property
    def runs_target(self) -> bool:
        """Whether this process takes part where one run of the target would do.

        No process can run a target that is split alone: then all do the same.
        """
        return self.main or self.split

    @property
    def split(self) -> bool:
        return self.conf.splits_target and not self.alone

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss is compiled by itself.

        Where operations are recorded, the whole step is one graph; and no graph holds the calls
        that gather a sharded target's head.
        """
        return not self.device.lazy and (self.alone or self.conf.target is Weights.replicated)

    def wait(self) -> None:
        if not self.alone:  # on XLA a graph of its own, even for one process
            self.accelerator.wait_for_everyone()

    def anywhere(self, holds: bool) -> bool:
        """Whether it holds on any process."""
        if self.alone:
            return holds
        found = torch.tensor(float(holds), device=self.accelerator.device)
        return bool(cast(Tensor, self.accelerator.reduce(found, "sum")))

    def agree(self, number: int) -> bool:
        """Compare a number over all processes; the answer is the same on each."""
        if self.alone:
            return True
        numbers = torch.tensor([number], device=self.accelerator.device)
        return len(cast(Tensor, self.accelerator.gather(numbers)).unique()) == 1

    def settle(self) -> None:
        """Wait, where all processes run the target together."""
        if self.split:
            self.wait()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Others find what the main process wrote; with a split target all run at once."""
        if self.split or self.alone:
            yield
        else:
            with self.accelerator.main_process_first():
                yield

    def total(self, values: Tensor) -> Tensor:
        """Their sum over all processes."""
        if self.alone:
            return values
        if self.device.lazy:  # Accelerate's own would end the graph that is being recorded
            from torch_xla.core import xla_model  # pyright: ignore[reportMissingImports]

            return xla_model.all_reduce(xla_model.REDUCE_SUM, values)
        return cast(Tensor, self.accelerator.reduce(values, "sum"))

    # --- the target ---------------------------------------------------------------------------

    def target(self, conf: TargetConf) -> Target:
        """The target, of which this process holds all or its part."""
        if not self.split:
            return conf.build(self.device)
        if self.device.name == "xla":
            return self._cut_target(conf)
        target = conf.build(self.device, read=self._read_part)
        return target.eager()  # graphs of sharded tensors would break at every collective

    def _read_part(self, source: Source) -> Any:
        """Each process reads its own part of the weights alone."""
        from transformers.distributed.configuration_utils import DistributedConfig

        sharded = self.conf.target is Weights.sharded

        class Layout(DistributedConfig):
            @property
            def dp_size(self) -> int:
                """Without shards the copies are nobody's business: no FSDP around them."""
                return super().dp_size if sharded else 1

        layout = Layout(
            tp_size=self.conf.tensor,
            fsdp_size=self.data if sharded else 1,
            dp_replicate_size=1 if sharded else self.data,
        )
        model = source.model(self.device.dtype, distributed_config=layout)
        del model.config.distributed_config  # else drafts that copy the config were split as well
        text = model.config.get_text_config()
        model.key_value_heads = text.num_key_value_heads // self.conf.tensor
        return model

    def _cut_target(self, conf: TargetConf) -> Target:
        """On the host it is whole: there it gets its name, and drafts begin with its tables."""
        target = conf.build(self.device, read=lambda source: source.model(self.device.dtype))
        tables = (target.model.get_input_embeddings(), target.head)
        whole = [name for name, layer in target.model.named_modules() if layer in tables]
        tensor_parallel.parallelise(target.model, self._engine_layers(), whole=whole)
        target.kv_heads = tensor_parallel.key_value_heads(target.model)
        target.model.to(self.device.torch_device)
        return target

    def _engine_layers(self) -> tensor_parallel.Layers:
        """The classes of neuronx-distributed, for the group that this process is in."""
        layers, engine = parallel_engine(self.conf.tensor)
        if not engine.model_parallel_is_initialized():
            engine.initialize_model_parallel(tensor_model_parallel_size=self.conf.tensor)
        if engine.get_data_parallel_rank() != self.rank:  # rings of Trn2: (0..15, 48..63)
            raise UserError(
                "parallel.tensor: neuronx-distributed must group neighbouring processes, got other "
                f"groups for {self.conf.tensor} on this instance; choose another parallel.tensor"
            )
        return tensor_parallel.Layers(
            ranks=self.conf.tensor,
            rank=engine.get_tensor_model_parallel_rank(),
            column=layers.ColumnParallelLinear,
            row=layers.RowParallelLinear,
            embedding=layers.ParallelEmbedding,
        )

    # --- the draft ----------------------------------------------------------------------------

    def prepare(self, lesson: nn.Module) -> nn.Module:
        """Let gradients become the mean over all processes. Before optimizers are built."""
        if self.conf.draft is Weights.replicated or self.alone or self.spreads:
            return self.accelerator.prepare(lesson)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One group: methods read weights by name, outside of the modules that hold them.
        mesh = init_device_mesh(self.device.torch_device.type, (self.accelerator.num_processes,))
        fully_shard(lesson.to(self.accelerator.device), mesh=mesh)
        return self.accelerator.prepare_model(lesson, evaluation_mode=True)  # no DDP around it

    @property
    def spreads(self) -> bool:
        """Whether only the moments of a sharded draft are: ZeRO-1, where there is no FSDP2."""
        return self.conf.draft is Weights.sharded and self.device.name == "xla" and not self.alone

    @property
    def adamw(self) -> type[AdamW]:
        return SpreadAdamW if self.spreads else AdamW

    def begin(self, optimizers: list[Optimizer]) -> None:
        """After the last state was loaded, before the first step."""
        for optimizer in optimizers:
            if isinstance(optimizer, SpreadAdamW):
                from torch_xla.core import xla_model  # pyright: ignore[reportMissingImports]
                from torch_xla.distributed import (  # pyright: ignore[reportMissingImports]
                    zero_redundancy_optimizer as zero,
                )

                optimizer.begin(
                    zero.ZeroRedundancyOptimizer, partial(xla_model.all_gather, pin_layout=False),
                    ranks=self.accelerator.num_processes, rank=self.accelerator.process_index,
                )  # fmt: skip
                self.device.synchronize()  # else the first step's graph would hold this, too

    @contextmanager
    def whole_moments(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """Moments of whole weights, to be written."""
        spread = [optimizer for optimizer in optimizers if isinstance(optimizer, SpreadAdamW)]
        for optimizer in spread:
            optimizer.collect()
        yield
        for optimizer in spread:
            optimizer.release()

    def whole(self, draft: Draft) -> AbstractContextManager[None]:
        """The draft with all its weights on every process, to be decoded with or written."""
        return gathered(draft)
