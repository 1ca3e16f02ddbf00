"""Run two processes, eager and compiled: compiled_ddp_run.py FOLDER, under a launcher, with a target in FOLDER/target.

Each process writes to FOLDER/parts-N.json how many graphs the backend compiled in each run: DDP cuts
a compiled loss where its buckets of gradients end.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch._dynamo
import torch.distributed
from accelerate.utils import DistributedDataParallelKwargs
from torch._dynamo.backends.debugging import aot_eager

from data.config import DataConf
from models.device.graph_budget import GraphLedger
from models.drafts.options import CausalLMConf, Eagle3Conf, InitFrom, MedusaConf
from models.parallel.processes import leave_processes
from models.targets.config import TargetConf
from models.targets.loading import load_split_target
from tests.support.models.tiny import CPU
from tests.support.runs.layout_run import build_layout_target
from tests.support.runs.toy_run import toy_conf, toy_run
from train.config.run import ParallelConf, Weights
from train.distributed import build

DRAFTS = {
    "eagle3": Eagle3Conf(layers=[0, 1, 2], ttt_steps=2),
    "draft model": CausalLMConf(init_from=InitFrom.pruned, layers=[0]),
    "medusa": MedusaConf(heads=2),
}
SMALL_BUCKET_MB = 0.004  # about the size of a weight of the draft
parts: Counter[str] = Counter()


def run(folder: Path, name: str, *, compiled: bool, bucket_mb: float = 25, tensor: int = 1, **layout: Any) -> None:
    """Train three steps of two micro-batches a process, which share a split target or have one each."""

    @torch._dynamo.register_backend(name=f"counted_{len(parts)}")
    def counted(*args, **kwargs):
        parts[folder.name] += 1
        return aot_eager(*args, **kwargs)

    backend = f"counted_{len(parts)}"
    parts[folder.name] = 0
    device = replace(CPU, compiles=compiled, backend=backend, ledger=GraphLedger())
    build.DistributedDataParallelKwargs = partial(DistributedDataParallelKwargs, bucket_cap_mb=bucket_mb)
    conf = toy_conf(
        draft=DRAFTS[name], data=DataConf(seed=1), optim={"steps": 3, "rows_per_step": 8, "micro_batch_size": 2}
    )
    conf.interval.log, conf.parallel = 1, ParallelConf(tensor=tensor, **layout)
    target = build_layout_target(device)
    if tensor > 1:
        target = load_split_target(TargetConf(path=str(folder.with_name("target"))), device, tensor=tensor)
        assert target.device.compiles is compiled
    toy_run(folder, conf, target=target, device=device)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in DRAFTS:
        run(folder / f"{name}, eager", name, compiled=False)
        run(folder / f"{name}, compiled", name, compiled=True)
    run(folder / "eagle3, split target", "eagle3", compiled=True, tensor=2)
    for name in ("eagle3", "medusa"):
        run(folder / f"{name}, split heads", name, compiled=True, draft=Weights.sharded, split_heads=True)
    # PyTorch refuses buckets smaller than the first, which has 1 MB.
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = int(SMALL_BUCKET_MB * 2**20)
    run(folder / "eagle3, small buckets", "eagle3", compiled=True, bucket_mb=SMALL_BUCKET_MB)
    (folder / f"parts-{os.environ['RANK']}.json").write_text(json.dumps(parts))
    leave_processes()
