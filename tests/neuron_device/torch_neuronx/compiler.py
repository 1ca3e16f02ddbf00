"""The compiler of that name: it takes a full graph and runs it operator by operator."""

from collections.abc import Callable

from torch.fx import GraphModule


def neuron(graph: GraphModule, example_inputs: list, **_: object) -> Callable:
    return graph.forward
