"""The graphs that a run compiles: announced before it starts, checked on every call while it runs.

If a device can take an hour to compile a graph, its runs are strict: an unannounced graph is an error
before it is compiled. On others it is compiled and counted, with a warning. See docs/graphs.md.
"""

import hashlib
import inspect
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

KIND_SEPARATOR = ":"  # between a function and the kind of draft that it runs
PURPOSES = {  # of functions, as progress lines name them; docs/graphs.md describes each
    "prefill": "the target reads a prompt",
    "begin": "the draft reads a prompt",
    "fused": "a whole round",
    "verify": "the target scores a proposal",
    "accept": "tokens of a proposal are accepted",
    "cache_move": "keys of accepted tokens move",
    "draft": "the draft proposes",
    "run_target": "the target reads training rows",
    "loss_terms": "the draft's layers and their gradient",
    "evaluate_chunk": "the loss of a chunk of tokens and its gradient",
    "train_step": "a whole training step",
    "allocate_optimizer_states": "memory of the optimizer",
    "allocate_slots": "memory of prompts and answers",
    "start_rows": "a row takes a prompt",
    "empty_like": "rows are emptied",
    "scatter_rows": "prompts join the batch",
}
CallShape = tuple[tuple[Any, ...], ...]  # name and description of each argument's parts


class Graph(NamedTuple):
    """A graph that a run will need. Equal ones are the same graph."""

    function: str
    shape: tuple[Any, ...] = ()  # distinguishes it from the function's other graphs


class UnannouncedGraphError(RuntimeError):
    """A call that needs more graphs than the run announced for its function."""


@dataclass(kw_only=True)
class GraphBudget:
    """Graphs by function: the number announced, the shapes called, the number compiled."""

    announced: Counter[str]
    strict: bool  # whether an unannounced graph ends the run
    called_shapes: dict[str, dict[CallShape, None]] = field(default_factory=lambda: defaultdict(dict))
    compiled: Counter[str] = field(default_factory=Counter)
    compile_s: float = 0.0
    on_graph: Callable[[str], None] | None = None  # called with a line for each compiled graph
    compiled_late: int = 0  # number compiled outside of `warming`
    warming: bool = False
    warned: set[str] = field(default_factory=set)  # functions with unannounced graphs

    @property
    def unannounced(self) -> int:
        """Return the number of graphs that the run needed but did not announce.

        Shapes that were called count too: their graphs may stem from an earlier run in this process.
        """
        needed = {name: max(len(s), self.compiled[name]) for name, s in self.called_shapes.items()}
        return (Counter(needed) - self.announced).total()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the announced and the compiled number by function, for a report."""
        return {
            name: {"announced": self.announced[name], "compiled": self.compiled[name]}
            for name in sorted(self.announced | self.compiled)
        }

    def record_call(self, function: str, shape: CallShape) -> None:
        """Record the shape of a call; before that, report it if it is one more than announced."""
        known = self.called_shapes[function]
        if shape not in known and len(known) >= self.announced[function]:
            self._report_unannounced(function, describe_shape(shape, list(known)))
        known[shape] = None

    def record_compiled(self, function: str, count: int, shape: CallShape, *, seconds: float) -> None:
        """Record the graphs that a call compiled, and report more than the function announced.

        The shapes were checked before, so that these are recompilations of a known shape.
        """
        self.compiled[function] += count
        self.compiled_late += 0 if self.warming else count
        self.compile_s += seconds
        if self.on_graph is not None:
            self.on_graph(f"{self._describe_progress(seconds)}: {describe_purpose(function, shape)}")
        if self.compiled[function] > self.announced[function]:
            self._report_unannounced(
                function,
                "the same shape again, because something else that it reads has changed "
                f"(TORCH_LOGS=recompiles): {describe_shape(shape)}",
            )

    def _describe_progress(self, seconds: float) -> str:
        """Return how many graphs are compiled, the last one in `seconds`, and the time left."""
        compiled, announced = self.compiled.total(), self.announced.total()
        seconds_left = self.compile_s / compiled * max(announced - compiled, 0)
        left = f", about {timedelta(seconds=round(seconds_left))} left" if seconds_left else ""
        return f"graph {compiled} of {announced}: {seconds:.1f} s{left}"

    def _report_unannounced(self, function: str, reason: str) -> None:
        """Raise UnannouncedGraphError in a strict run; else warn once per function."""
        message = f"graphs: {function} has {self.announced[function]} announced, got one more: {reason}"
        if self.strict:
            raise UnannouncedGraphError(message)
        if function not in self.warned:
            log.warning("%s; further ones are only counted", message)
        self.warned.add(function)


@dataclass
class GraphLedger:
    """The graph budget of a device. Calls are checked inside `expect_graphs` and free elsewhere."""

    budget: GraphBudget | None = None

    @contextmanager
    def expect_graphs(self, graphs: Iterable[Graph], *, strict: bool) -> Iterator[GraphBudget]:
        """Yield a budget of these graphs, against which calls in the block are checked.

        If `strict`, the first call that needs a different graph raises UnannouncedGraphError.
        """
        announced = Counter(g.function for g in set(graphs))
        before, self.budget = self.budget, GraphBudget(announced=announced, strict=strict)
        try:
            yield self.budget
        finally:
            self.budget = before

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Exclude the graphs that the block compiles from `compiled_late`."""
        budget = self.budget or GraphBudget(announced=Counter(), strict=False)
        before, budget.warming = budget.warming, True
        try:
            yield
        finally:
            budget.warming = before

    def count_shapes(self) -> int:
        """Return the number of shapes called: the number of graphs if everything were compiled."""
        return sum(map(len, self.budget.called_shapes.values())) if self.budget else 0

    def record_calls(
        self,
        function: Callable,
        *,
        original: Callable,
        unread: tuple[str, ...],
        name: str,
        count_compiled: Callable[[], int],
    ) -> Callable:
        """Return `function`, compiled from `original`, so that each call is recorded in the budget.

        `count_compiled` returns how many graphs have been compiled so far.
        """
        names = list(inspect.signature(original).parameters)
        constants: dict[int, tuple[Any, str]] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            if budget is None:
                return function(*args, **kwargs)
            shape = call_shape(dict(zip(names, args, strict=False)) | kwargs, constants, unread)
            before, start = count_compiled(), time.perf_counter()
            budget.record_call(name, shape)
            result = function(*args, **kwargs)
            if count := count_compiled() - before:
                budget.record_compiled(name, count, shape, seconds=time.perf_counter() - start)
            return result

        return call


def call_shape(args: dict[str, Any], constants: dict[int, tuple[Any, str]], unread: tuple[str, ...] = ()) -> CallShape:
    """Return everything in a call's arguments that graphs depend on, by name.

    Parts named `unread` are left out. Arguments whose parts cannot change, such as a model, a cache
    or a tree, are described once and then kept in `constants`.

    >>> import torch
    >>> call_shape({"ids": torch.zeros(1, 4), "layers": [1, 3]}, {})
    (('ids', (1, 4), torch.float32), ('layers', (1, 3)))
    """
    described = (_describe_value(name, value, constants, unread) for name, value in args.items())
    return tuple(chain.from_iterable(described))


def _describe_value(
    path: str, value: Any, constants: dict[int, tuple[Any, str]], unread: tuple[str, ...]
) -> Iterator[tuple[Any, ...]]:
    kind = type(value)
    if path in unread:
        return
    if isinstance(value, Tensor):
        # PyTorch compiles again for other strides; those of contiguous tensors follow from sizes.
        strides = () if value.is_contiguous() else ("strides", value.stride())
        any_size_dim = getattr(value, "any_size_dim", None)
        sizes = tuple("any" if dim == any_size_dim else size for dim, size in enumerate(value.shape))
        yield path, sizes, value.dtype, *strides
    elif value is None or kind in (bool, int, float, str):
        yield path, value
    elif kind is list:  # of numbers
        yield path, tuple(value)
    elif id(value) not in constants and (parts := _name_parts(value, kind)) is not None:
        for name, part in parts:
            yield from _describe_value(f"{path}.{name}", part, constants, unread)
    else:
        if id(value) not in constants:
            constants[id(value)] = value, graph_key_of(value)
        yield path, constants[id(value)][1]


def mark_any_size(tensor: Tensor, dim: int) -> Tensor:
    """Let one graph serve all sizes of a dimension but 0 and 1; calls that differ in it alone have one shape.

    An operator that cannot makes a graph of this size, which the budget counts as one more.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    tensor.any_size_dim = dim  # type: ignore[attr-defined]
    return tensor


def _name_parts(value: Any, kind: type) -> Iterable[tuple[Any, Any]] | None:
    """Return the named parts of a container or a dataclass without `graph_key`, else None."""
    if kind is tuple:
        return enumerate(value)
    if is_dataclass(kind) and not hasattr(kind, "graph_key"):
        return vars(value).items()
    return value.items() if kind is dict else None


def graph_key_of(value: Any) -> str:
    """Return a key of what graphs depend on in a value that cannot change.

    Modules are described by their class, their tensors and their `graph_switches`, if they have any, other values by
    their `graph_key`.
    """
    if not isinstance(value, nn.Module):
        return value.graph_key
    listed = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in chain(value.named_parameters(), value.named_buffers())
    ]
    described = str((listed, getattr(value, "graph_switches", None)))
    return f"{type(value).__name__} {hashlib.sha256(described.encode()).hexdigest()[:8]}"


def describe_shape(shape: CallShape, known: Sequence[CallShape] = ()) -> str:
    """Return a shape as text; with `known` shapes, only the parts not in the most similar one.

    >>> from torch import int64
    >>> known = [(("ids", (1, 64), int64), ("layers", (1, 3)))]
    >>> describe_shape((("ids", (1, 96), int64), ("layers", (1, 3))), known)
    'ids [1, 96] int64'
    """
    new = min((set(shape) - set(other) for other in known), key=len, default=set(shape))
    return ", ".join(
        " ".join(f"[{', '.join(map(str, x))}]" if isinstance(x, tuple) else str(x).removeprefix("torch.") for x in part)
        for part in shape
        if part in new
    )


def describe_purpose(function: str, shape: CallShape) -> str:
    """Return in words what a graph is for: what it does, for which kind of draft, on how much.

    >>> describe_purpose("begin:eagle3", (("input_ids", (1, "any"), torch.int64),))
    'the draft reads a prompt (eagle3), 1 x any tokens'
    """
    name, _, kind = function.partition(KIND_SEPARATOR)
    sizes = (part[1] for part in shape if part[0].endswith("ids") and len(part) == 3)
    tokens = next((size for size in sizes if len(size) == 2 and 0 not in size), None)
    return (
        PURPOSES.get(name, name)
        + (f" ({kind})" if kind else "")
        + (f", {tokens[0]} x {tokens[1]} tokens" if tokens else "")
    )


def format_counts(counts: Mapping[str, int]) -> str:
    """Return graph counts as text, in total and by function, all kinds of a function together.

    >>> format_counts({"fused:eagle3": 2, "fused:alone": 1, "prefill": 2})
    '5 (fused 3, prefill 2)'
    """
    totals: Counter[str] = Counter()
    for name, count in counts.items():
        totals[name.partition(KIND_SEPARATOR)[0]] += count
    parts = ", ".join(f"{name} {count}" for name, count in sorted(totals.items()))
    return f"{totals.total()} ({parts})" if parts else "none"
