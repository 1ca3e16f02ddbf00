"""Record the operators that compiled functions run; find those that not every compiler supports."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import register_backend
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from models import operators
from models.device.device import Device
from models.device.graph_budget import GraphLedger
from tests.support.models.tiny import CPU
from tests.support.models.watching import WatchedOperators


@dataclass(frozen=True)
class Call:
    """An ATen operator with the tensors that it reads, its other arguments and its results."""

    name: str
    read: list[torch.Tensor]
    constants: list[Any]
    results: list[torch.Tensor]


GRAPHS: list[GraphModule] = []  # of forward passes, in the order of compilation
CALLS: list[Call] = []


def record_call(func: torch._ops.OpOverload, args: tuple, output: Any) -> None:
    leaves = tree_leaves(args)
    read = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    constants = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    # An operator in place has the name of its functional form.
    CALLS.append(Call(func.overloadpacket.__name__.rstrip("_"), read, constants, results))


def record_graph(graph: GraphModule, _inputs: list) -> Callable:
    """Compile nothing: a graph is run as it is, and the operators below autograd are recorded."""
    GRAPHS.append(graph)

    def run(*args):
        with WatchedOperators(record_call):
            return graph(*args)

    return run


register_backend(record_graph, name="recording")


def build_recording_device() -> Device:
    """Forget earlier records; return a device whose graphs are recorded and, as on accelerators, have no regions."""
    GRAPHS.clear()
    CALLS.clear()
    return Device(**vars(CPU) | {"compiles": True, "backend": "recording", "ledger": GraphLedger()})


def list_operators() -> set[str]:
    return {call.name for call in CALLS}


def find_forbidden() -> set[str]:
    """Return what not every compiler supports of all recorded calls."""
    return {problem for call in CALLS for problem in list_forbidden(call)}


def list_forbidden(call: Call) -> Iterator[str]:
    name, read = call.name, call.read
    if name.endswith("sort"):
        yield "sort"
    if name == "topk" and read[0].ndim != 2:
        yield "top-k of more than two dimensions"
    if name == "topk" and read[0].shape[-1] > operators.MAX_TOPK_COLUMNS:
        yield "top-k of wide rows"
    if name in ("scatter_add", "scatter_reduce", "index_add") and not read[0].is_floating_point():
        yield f"{name} of integers"
    if name in ("remainder", "fmod", "floor_divide") and not read[0].is_floating_point():
        yield f"{name} of integers"
    if name in ("argmax", "argmin", "max", "min") and not read[0].is_floating_point():
        yield f"{name} of integers"
    if name in ("tril", "triu"):
        yield name
    if name in ("gather", "scatter") and read[0].dtype is torch.bool:
        yield f"{name} of bools"
    if "shift" in name and read[0].dtype is torch.int64:
        yield "shift of 64 bits"
    if name == "lift_fresh":
        yield "constant of the host"
    if any(isinstance(value, float) and math.isinf(value) for value in call.constants):
        yield f"infinity in {name}"
    for tensor in (*read, *call.results):
        if not tensor.numel():
            yield f"size zero in {name}"
        if tensor.dtype is torch.float64:
            yield f"float64 in {name}"
