"""A stage: what training on several processes needs of a device, with two and with four of them.

The processes run the functions of FUNCTIONS in order, and a check reads the result of one.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.checkpoints.fingerprints import hash_tensors
from models.device.device import Device
from models.parallel.dtensor import full_params, full_tensor
from models.parallel.tensor_parallel import MIN_TORCH
from train.config.run import ParallelConf, Weights
from train.device.checks import Check, CheckContext, CheckFailedError, CheckSkippedError, confirm
from train.device.process_group import TIMEOUT_S, ProcessGroup, Report
from train.distributed.build import build_parallel
from train.distributed.parallel import Parallel
from train.run.state import RunState, TrainingState

WIDTH, ROWS = 64, 8  # of a small module; its rows on each process
NUM_REDUCED = 1 << 16
LATE_S = 0.2  # of a process at the barrier
# Sums of a few hundred fp32 products in another order differ by 1e-5; a process left out changes 1 / processes.
TOLERANCE = 1e-4
BF16_TOLERANCE = 0.02  # of products of numbers with eight bits; a micro-batch left out changes a half


@dataclass(kw_only=True)
class Member:
    """One of the processes; `folder` is that of all."""

    device: Device
    folder: Path

    @cached_property
    def replicated(self) -> Parallel:
        return build_parallel(ParallelConf(), self.device, trackers=[])

    @property
    def sharded(self) -> Parallel:
        return replace(self.replicated, conf=ParallelConf(draft=Weights.sharded))

    @property
    def sharded_in_bf16(self) -> Parallel:
        """Return the layout of large drafts: weights are gathered in bf16, and gradients summed in fp32."""
        return replace(self.sharded, device=replace(self.device, dtype=torch.bfloat16))

    @property
    def rank(self) -> int:
        return self.replicated.accelerator.process_index

    @property
    def processes(self) -> int:
        return self.replicated.accelerator.num_processes


def run_functions(report: Report, device: Device, folder: Path) -> None:
    """Run all functions in a process of the group."""
    member = Member(device=device, folder=folder)
    for name, (function, _) in FUNCTIONS.items():
        report(name, partial(function, member))
    member.replicated.end()


def list_checks(
    context: CheckContext, *, work: Callable[..., None] = run_functions, timeout_s: float = TIMEOUT_S
) -> Iterator[Check]:
    """Yield the checks; take each one after the other has run, because a group of processes ends with its last."""
    # Whole products of fp32 without graphs, as only what the processes send each other is checked.
    device = replace(context.device.eager(), dtype=torch.float32)
    for processes in (2, 4):
        folder = Path(tempfile.mkdtemp(dir=context.folder)) / "group"
        group = ProcessGroup(
            processes=processes, folder=folder, work=work, arguments=(device, folder), timeout_s=timeout_s
        )
        try:
            for name, (_, remedy) in FUNCTIONS.items():
                run = partial(read_result, context, group, name)
                yield Check(name=f"{processes} processes: {name}", run=run, remedy=remedy)
        finally:
            group.stop()


def read_result(context: CheckContext, group: ProcessGroup, name: str) -> str:
    if context.device.lazy:
        raise CheckSkippedError("PyTorch/XLA runs one process on a CPU; try several on Trainium by torchrun -m train")
    if context.accelerators < group.processes:
        raise CheckSkippedError(f"{group.processes} processes need as many devices, got {context.accelerators}")
    return group.read_result(name)


def connect(member: Member) -> str:
    counts = f"Accelerate sees {member.processes} processes, PyTorch {dist.get_world_size()}"
    return confirm(member.processes == dist.get_world_size(), f"{counts}; backends {dist.get_backend_config()}")


def reduce_on_device(dtype: torch.dtype, member: Member) -> str:
    # Small whole numbers, whose sums are exact in both types. Runs sum no integers on the device: Neuron refuses it.
    values = torch.arange(NUM_REDUCED, device=member.replicated.accelerator.device).remainder(8).to(dtype)
    total = member.replicated.all_reduce_sum(values * (member.rank + 1))
    return compare_sums(total, values, member.processes)


def reduce_on_host(member: Member) -> str:
    """Sum numbers of the host, which must not go over the device."""
    if "cpu:gloo" not in (backends := dist.get_backend_config()):
        raise CheckFailedError(f"the process group has no gloo for the host, but {backends}")
    values = torch.arange(NUM_REDUCED)
    total = values * (member.rank + 1)
    dist.all_reduce(total)
    dist.barrier()
    return compare_sums(total, values, member.processes)


def compare_sums(total: Tensor, values: Tensor, processes: int) -> str:
    """Confirm that `total` is the sum of the values times 1, 2, ... up to the number of processes."""
    wrong = int((total != values * (processes * (processes + 1) // 2)).sum())
    return confirm(not wrong, f"{wrong} of {len(values)} sums are wrong")


def build_module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))


def train_module(module: nn.Module, rows: Tensor, *, micro_batches: int) -> None:
    """Take two steps, the second one from gradients that were set to None."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(2):
        for part in rows.chunk(micro_batches):
            (module(part).float().square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_together(
    layout: Callable[[Member], Parallel], member: Member, *, micro_batches: int = 1, tolerance: float = TOLERANCE
) -> str:
    """Compare steps of all processes, each with its rows, with steps of a single process with all rows."""
    parallel = layout(member)
    device = parallel.accelerator.device
    rows = torch.randn(member.processes * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    before, alone, together = (build_module(seed=0).to(device) for _ in range(3))
    train_module(alone, rows, micro_batches=1)
    dtype = parallel.device.dtype
    with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        train_module(parallel.prepare(together), rows.chunk(member.processes)[member.rank], micro_batches=micro_batches)
    with full_params(together):
        start, expected, actual = map(flatten_weights, (before, alone, together))
    error = float((actual - expected).abs().max() / (expected - start).abs().max())
    if not error < tolerance:
        raise CheckFailedError(f"weights differ from a single process's by {error:.2g} of their change")
    # All processes must report the same text.
    return f"weights {hash_tensors({'': actual})[:12]}, off by {error:.1g} of their change"


def flatten_weights(module: nn.Module) -> Tensor:
    """Return all weights in one tensor of the host."""
    return torch.cat([p.detach().flatten().cpu() for p in module.parameters()])


def build_state(parallel: Parallel, seed: int) -> TrainingState:
    """Return a module after a step of AdamW, so that it has moments."""
    module = parallel.prepare(build_module(seed))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, WIDTH, device=parallel.accelerator.device)).sum().backward()
    optimizer.step()
    return TrainingState(module=module, optimizers=[optimizer], schedules=[])


def save_and_load(member: Member) -> str:
    """Save weights and moments as a run does, and load them into a module with other weights."""
    parallel, run = member.sharded, RunState(member.folder / "run", {})
    saved, loaded = (build_state(parallel, seed=seed) for seed in (1, 2))
    run.save(saved, parallel)
    run.load(loaded, parallel)
    states = [state.state_dict() for state in (saved, loaded)]
    pairs = [
        (before, states[1][part][key]) for part in ("weights", "moments") for key, before in states[0][part].items()
    ]
    pairs = [pair for pair in pairs if isinstance(pair[0], Tensor)]  # the others are options of AdamW
    wrong = sum(not torch.equal(full_tensor(before), full_tensor(after)) for before, after in pairs)
    return confirm(not wrong, f"{wrong} of {len(pairs)} tensors differ after they were saved and loaded")


def wait_for_all(member: Member) -> str:
    """Check that nobody passes the barrier before the last one, which is late, has come."""
    file = member.folder / "late"
    if member.rank == 0:
        time.sleep(LATE_S)
        file.touch()
    member.replicated.barrier()
    if not file.exists():
        raise CheckFailedError("the barrier let a process pass before the others had come")
    return "all waited for the last one"


def gather_numbers(member: Member) -> str:
    # An odd number above 2^24, where fp32 has none.
    numbers = member.replicated.gather((1 << 25) + 2 * member.rank + 1)
    expected = [(1 << 25) + 2.0 * rank + 1 for rank in range(member.processes)]
    return confirm(numbers == expected, f"gathered {numbers}, expected {expected}")


WRONG_SUMS = "its collectives cannot be used: update driver and runtime, or train with a single process"
HOST_REMEDY = "processes need gloo for the host's tensors: set GLOO_SOCKET_IFNAME to a network interface of all nodes"
# What the processes do, in this order, with the remedies.
FUNCTIONS: dict[str, tuple[Callable[[Member], str], str]] = {
    "connect": (connect, "end other processes that hold the devices; NCCL_DEBUG=INFO has NCCL say what it lacks"),
    **{
        f"all-reduce of {name}": (partial(reduce_on_device, dtype), WRONG_SUMS)
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    },
    "all-reduce of the host": (reduce_on_host, HOST_REMEDY),
    "barrier": (wait_for_all, HOST_REMEDY),
    "gather": (gather_numbers, HOST_REMEDY),
    "step by DDP": (partial(train_together, attrgetter("replicated")), "set parallel.draft=sharded"),
    "step by FSDP2": (
        partial(train_together, attrgetter("sharded")),
        f"set parallel.draft=replicated, or install torch {MIN_TORCH}",
    ),
    "two micro-batches by FSDP2 in bf16": (
        partial(train_together, attrgetter("sharded_in_bf16"), micro_batches=2, tolerance=BF16_TOLERANCE),
        "set parallel.draft=replicated; else one micro-batch a step: optim.rows_per_step=PROCESSES",
    ),
    "distributed checkpoint": (save_and_load, "set output_dir to a folder that all processes share"),
}
