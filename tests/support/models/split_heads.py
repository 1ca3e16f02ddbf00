"""Compute the losses of processes that split the heads: split_heads.py FOLDER, in four processes.

In groups of 1, 2 and 4, each process has as many tokens of `draw_inputs` and rows of its heads. It writes the values,
and the gradients as full tensors, to FOLDER/SIZE-RANK.pt, by case; and the collectives of two chunks.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from models.losses.chunked import chunked_distillation_loss
from models.losses.config import LossName
from models.parallel.dtensor import full_tensor
from models.parallel.processes import leave_processes
from tests.support.models.loss_cases import DRAFT_IDS, build_conf, draw_inputs

PROCESSES, TOKENS, STEPS = 4, 24, (3,)
CASES = [*product(LossName, (None, DRAFT_IDS), (False, True))]  # loss, vocabulary, a head for each step


def draw_case(draft_ids: Any, own_heads: bool) -> dict[str, Any]:
    return draw_inputs(tokens=TOKENS, steps=STEPS, draft_ids=draft_ids, own_heads=own_heads)


def take_share(inputs: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Return this process's tokens, and the heads split by rows."""
    rank, size = mesh.get_local_rank(), mesh.size()
    axes = {"draft_hidden": -2, "target_hidden_or_topk": 0, "weight": -1, "labels": 0}
    own = {name: inputs[name].detach().chunk(size, axis)[rank] for name, axis in axes.items()}
    heads = [distribute_tensor(head.detach(), mesh, [Shard(0)]).requires_grad_() for head in inputs["draft_heads"]]
    return inputs | own | {"draft_hidden": own["draft_hidden"].requires_grad_(), "draft_heads": heads}


def compute_case(mesh: DeviceMesh, name: LossName, draft_ids: Any, own_heads: bool) -> list[Any]:
    inputs = take_share(draw_case(draft_ids, own_heads), mesh)
    total, metrics = chunked_distillation_loss(**inputs, conf=build_conf(name))
    hidden_grad, *head_grads = torch.autograd.grad(total, [inputs["draft_hidden"], *inputs["draft_heads"]])
    return [total.detach(), metrics, hidden_grad, [full_tensor(grad) for grad in head_grads]]


def count_collectives(mesh: DeviceMesh) -> dict[str, int]:
    """Count the collectives of a loss in two chunks and of its backward pass."""
    inputs = take_share(draw_case(None, False), mesh)
    chunk = inputs["draft_hidden"].shape[:-1].numel() // 2
    with CommDebugMode() as seen:
        total, _ = chunked_distillation_loss(**inputs, conf=build_conf(LossName.soft_ce, logits_chunk=chunk))
        total.backward()
    return {str(kind): count for kind, count in seen.get_comm_counts().items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in (1, 2, 4):
        mesh = init_device_mesh("cpu", (PROCESSES // size, size), mesh_dim_names=("groups", "ranks"))["ranks"]
        results = {case: compute_case(mesh, name, ids, own) for case, (name, ids, own) in enumerate(CASES)}
        result = {"cases": results, "collectives": count_collectives(mesh)}
        torch.save(result, Path(sys.argv[1]) / f"{size}-{dist.get_rank()}.pt")
    leave_processes()
