"""Record the ATen graphs of compiled functions; find operators that not every compiler supports."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from functorch.compile import make_boxed_func
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from models import operators
from models.device.graph_budget import GraphLedger
from tests.support.models.tiny import CPU

GRAPHS: list[GraphModule] = []  # forward, backward and inference, in the order of compilation


def record_graph(graph: GraphModule, _inputs: list):
    GRAPHS.append(graph)
    return make_boxed_func(graph.forward)


register_backend(
    aot_autograd(fw_compiler=record_graph, bw_compiler=record_graph, inference_compiler=record_graph), name="recording"
)


def build_recording_device():
    """Forget earlier graphs and return a device that keeps those that it compiles in GRAPHS."""
    GRAPHS.clear()
    return replace(CPU, compiles=True, backend="recording", ledger=GraphLedger())


def list_operators() -> set[str]:
    return {get_name(node) for graph in GRAPHS for node in list_nodes(graph)}


def find_forbidden() -> set[str]:
    """Return the operators of all recorded graphs that not every compiler supports."""
    return {problem for graph in GRAPHS for node in list_nodes(graph) for problem in list_forbidden(node)}


def list_nodes(graph: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of its regions."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def get_name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet else str(node.target)


def list_forbidden(node: Node) -> Iterator[str]:
    name = get_name(node)
    read = [value for other in node.all_input_nodes for value in list_tensors(other)]
    constants = tree_leaves((node.args, node.kwargs))
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
    if name == "lift_fresh_copy":
        yield "constant of the host"
    if any(isinstance(value, float) and math.isinf(value) for value in constants):
        yield f"infinity in {name}"
    for tensor in list_tensors(node):
        if not tensor.numel():
            yield f"size zero in {node.op} {name}"
        if tensor.dtype is torch.float64:
            yield f"float64 in {name}"


def list_tensors(node: Node) -> list[torch.Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
