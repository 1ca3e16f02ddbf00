"""Check the layout of a run's processes, and build them for the route of their device."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs

from models.device.config import DeviceName
from models.device.device import Device
from models.drafts.options import InitFrom
from models.io.errors import require
from models.parallel import torchrun
from models.parallel.processes import connect_hosts, connect_processes
from models.parallel.tensor_parallel import check_heads, check_native_split, check_torch, plan_shards
from models.targets.pretrained import build_meta_model, read_model_config
from train.config.optim import AUTO
from train.config.run import ParallelConf, TrainConf, Weights
from train.distributed.parallel import Parallel
from train.distributed.xla import XlaParallel, check_xla_layout, import_neuronx_distributed

HEADS_REMEDY = "lower it; parallel=sharded needs no heads"


def check_parallel(conf: TrainConf) -> None:
    """Raise UserError if the launched processes cannot train in the run's layout; read only the target's config."""
    torchrun.check_launch()
    parallel, processes = conf.parallel, torchrun.get_world_size()
    require(
        processes % parallel.tensor_size == 0,
        f"parallel.tensor: must divide the {processes} processes, got {parallel.tensor}; launch a multiple of it",
    )
    may_share = parallel.tensor == AUTO and conf.device.is_native and not conf.draft.trains_target
    most_sharing = processes & -processes if may_share else parallel.tensor_size  # the largest power of two
    rows, data_ranks = conf.optim.rows_per_step, processes // most_sharing
    require(
        rows % data_ranks == 0,
        f"optim.rows_per_step: must be a multiple of the {data_ranks} data-parallel processes, "
        f"got {rows}; give {data_ranks} rows or a multiple of that",
    )
    check_layout(conf)
    if conf.device.name is DeviceName.xla:
        if parallel.tensor_size > 1:
            plan_shards(build_meta_model(conf.target), parallel.tensor_size)
        return
    check_torch(splits_weights=parallel.splits_weights)
    if parallel.tensor_size > 1 and parallel.target is not Weights.sharded:
        check_native_split(build_meta_model(conf.target), parallel.tensor_size, remedy=HEADS_REMEDY)
    elif parallel.tensor_size > 1:
        check_heads(parallel.tensor_size, read_model_config(conf.target).get_text_config(), remedy=HEADS_REMEDY)


def check_layout(conf: TrainConf) -> None:
    """Raise UserError for a layout that the draft or the device's route cannot train in."""
    parallel = conf.parallel
    require(
        not (conf.draft.trains_target and parallel.splits_weights),
        "parallel: must split no weights for a draft that adapts its target, got "
        f"tensor={parallel.tensor}, target={parallel.target.name}, draft={parallel.draft.name}; choose another draft",
    )
    require(
        not parallel.split_heads or (parallel.draft is Weights.sharded and conf.draft.trains_heads),
        "parallel.split_heads: must be false unless parallel.draft=sharded and a vocabulary head of the draft learns, "
        "got true; leave it out, or set parallel.draft=sharded",
    )
    if conf.device.name is DeviceName.xla:
        check_xla_layout(parallel)
        require(
            parallel.tensor_size == 1 or getattr(conf.draft, "init_from", None) is not InitFrom.pruned,
            f"parallel.tensor: must be 1 for draft.init_from=pruned with device=xla, where no process has the whole "
            f"target, got {parallel.tensor}; start from a pretrained draft, draft.init_from=checkpoint draft.path=DIR",
        )


def build_parallel(conf: ParallelConf, device: Device, *, trackers: list[str]) -> Parallel:
    """Connect the processes that were started, by the device's route; raise UserError if it cannot train."""
    if device.name == "xla" and conf.tensor_size > 1:
        import_neuronx_distributed(conf.tensor_size)  # early, before anything is loaded
    accelerator = build_accelerator(device, trackers=trackers)
    if device.name != "xla":
        return Parallel(conf=conf, device=device, accelerator=accelerator)
    return XlaParallel(conf=conf, device=device, accelerator=accelerator, host_group=connect_hosts())


def build_accelerator(device: Device, *, trackers: list[str]) -> Accelerator:
    """Build an Accelerator with the device's mixed precision; master weights stay fp32."""
    # A sweep runs several configs in one process, and Accelerate would reject a second precision.
    AcceleratorState._reset_state()
    # Accelerate takes a group as it is; its own would lack gloo.
    connect_processes(device.torch_device.type)
    accelerator = Accelerator(
        mixed_precision="bf16" if device.dtype is torch.bfloat16 else "no",
        cpu=device.torch_device.type == "cpu",
        log_with=[*trackers] or None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        step_scheduler_with_optimizer=False,  # else schedules run ahead by the number of processes
    )
    require(
        accelerator.device.type == device.torch_device.type,
        f"device.name: Accelerate trains on {accelerator.device.type} here, got {device.name}; "
        "if torch_xla is installed, set USE_TORCH_XLA=0 to leave it alone",
    )
    return accelerator
