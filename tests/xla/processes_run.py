"""Save and load a state with two processes of the XLA route: processes_run.py FOLDER, with torchrun's variables.

PyTorch/XLA's CPU device has a world of its own for each process, so that the accelerator is a stand-in, and nothing
goes over the device.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from models.parallel.processes import connect_hosts, connect_processes
from train.config.run import ParallelConf
from train.distributed.xla import XlaParallel
from train.run.state import RunState, TrainingState


def build_state(device: torch.device, seed: int) -> TrainingState:
    torch.manual_seed(seed)
    module = torch.nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4, device=device)).sum().backward()
    optimizer.step()
    return TrainingState(module=module, optimizers=[optimizer], schedules=[])


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    device = open_device(DeviceConf(name=DeviceName.xla))
    connect_processes(device.torch_device.type)
    accelerator: Any = SimpleNamespace(process_index=rank, num_processes=2, is_main_process=rank == 0)
    parallel = XlaParallel(conf=ParallelConf(), device=device, accelerator=accelerator, host_group=connect_hosts())
    assert parallel.gather(rank) == [0.0, 1.0]
    assert parallel.run_on_main(lambda: rank) == 0
    run, saved, loaded = RunState(folder, {}), *(build_state(device.torch_device, seed) for seed in (1, 2))
    run.save(saved, parallel)
    run.load(loaded, parallel)
    pairs = zip(saved.module.parameters(), loaded.module.parameters(), strict=True)
    assert all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in pairs)
    assert dist.get_backend() == "xla"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
