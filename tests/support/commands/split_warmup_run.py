"""Warm up a run whose target is split: split_warmup_run.py TARGET PROMPTS OUTPUT_DIR, by a launcher."""

import sys
from dataclasses import replace

import torch

from infer.config import EvaluationConf
from models.device.opening import open_device
from models.targets.config import TargetConf
from models.trees.config import TreeConf
from models.trees.tree import TreeKind
from tests.support.runs.parallel_run import DRAFTS
from tests.support.runs.toy_run import toy_conf
from train.config.run import ParallelConf
from train.distributed.build import build_parallel
from train.graph_warmup import warm_up_run


def main(target: str, prompts: str, output_dir: str) -> None:
    torch.set_num_threads(1)
    conf = toy_conf(
        draft=DRAFTS["eagle3"],
        optim={"steps": 4, "rows_per_step": 8},
        tree=TreeConf(kind=TreeKind.chain, depth=2),
        parallel=ParallelConf(tensor=2),
        evaluation=EvaluationConf(prompts=prompts, max_new_tokens=4, batch_sizes=[]),
        target=TargetConf(path=target),
        output_dir=output_dir,
    )
    device = replace(open_device(conf.device), compiles=True, backend="eager")  # compiles nothing, which is quick
    warm_up_run(conf, build_parallel(conf.parallel, device, trackers=[]))


if __name__ == "__main__":
    main(*sys.argv[1:])
