"""Two nodes, as the Kubernetes job launches them, both start again when a worker of one dies."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.commands.pages import ROOT
from tests.support.commands.ports import find_free_port
from tests.support.runs.killing import TIMEOUT_S

WORKER = """
import os, signal, time
import torch.distributed as dist

dist.init_process_group("gloo")
mine = open(f"{os.environ['LEFT']}/{dist.get_rank()}", "a")
mine.write("started ")
mine.flush()
dist.barrier()
if dist.get_rank() == 1 and os.path.getsize(mine.name) == len("started "):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
mine.write("finished")
"""


def test_both_nodes_start_again_when_a_worker_of_one_dies(tmp_path):
    (tmp_path / "train.py").write_text(WORKER)
    runtime, _ = yaml.safe_load_all((ROOT / "scripts/eks/trn2.yaml").read_text())
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    injected = {  # by Trainer
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(find_free_port()),
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
    }
    launcher, *arguments = container["command"]
    for name, value in injected.items():
        arguments = [word.replace(f"$({name})", value) for word in arguments]
    nodes = [
        subprocess.Popen(
            [Path(sys.executable).parent / launcher, *arguments],
            cwd=tmp_path,
            env=os.environ
            | {name: value for name, value in variables.items() if name.startswith("TORCH_")}
            | injected
            | {"PET_NODE_RANK": str(rank), "LEFT": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        )
        for rank in (0, 1)
    ]
    try:
        assert [node.wait(timeout=TIMEOUT_S) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["started started finished"] * 2
