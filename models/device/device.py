"""A device: where tensors live, how functions are compiled, how clocks wait for results.

Kinds are named in config.py and chosen in opening.py.
"""

import functools
import platform
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from models.device.graph_budget import KIND_SEPARATOR, Graph, GraphBudget, GraphLedger, format_counts

SMALL_LAYER_WEIGHTS = 1_000_000  # one core reads this many in a fraction of a millisecond
# Prompt buckets x tree shapes. torch fails above its limit, which is 8 by default.
MAX_GRAPHS_PER_FUNCTION = 64
SLOW_COMPILERS = ("neuron", "xla")  # so unannounced graphs are errors


@dataclass(kw_only=True)
class Device:
    """A device to compute on, and the few operations that differ between kinds of hardware."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    compiles: bool
    backend: str = "inductor"
    threads: int | None = None  # of the CPU, if the user chose it
    instance_type: str | None = None  # EC2's type of a Trainium or Inferentia machine
    environment: dict[str, str] = field(default_factory=dict)  # variables for compiler and runtime
    counts_shapes: bool = False  # counts shapes even if nothing is compiled
    records_rounds: bool = False  # rounds of decoding are recorded once and replayed
    ledger: GraphLedger = field(default_factory=GraphLedger, compare=False, repr=False)
    # No fields, as they follow from the class.
    lazy = False  # operations are recorded, and computed as one graph at the next sync

    @property
    def has_static_shapes(self) -> bool:
        """Return whether calls must have few shapes."""
        return self.compiles or self.counts_shapes or self.records_rounds

    @property
    def compiles_slowly(self) -> bool:
        """Return whether one graph can take an hour to compile."""
        return self.name in SLOW_COMPILERS

    def compile(
        self, function: Callable, *, frozen_names: tuple[str, ...] = (), unread: tuple[str, ...] = (), kind: str = ""
    ) -> Callable:
        """Return the function compiled to static graphs without breaks, or itself if it is not.

        Inside `expect_graphs`, a call that needs an unannounced graph raises an error on devices
        that compile slowly, and is counted on others.

        Each `kind` has graphs of its own: PyTorch checks a call against all graphs of a function,
        and fails if a module of a different class lacks an attribute that a graph has read.

        Values below `frozen_names` cannot change, and are not checked before each call. Values below
        `unread` are parts of the arguments that the function does not read: the ledger leaves them out of
        its shapes. See docs/decoding.md.
        """
        if not self.has_static_shapes:
            return function
        compiled = self._compile_function(function, frozen_names, kind) if self.compiles else function
        count = self.count_graphs if self.compiles else self.ledger.count_shapes
        name = f"{function.__name__}{KIND_SEPARATOR}{kind}" if kind else function.__name__
        return self.ledger.record_calls(compiled, original=function, unread=unread, name=name, count_compiled=count)

    def compile_part(self, function: Callable, *, frozen_names: tuple[str, ...] = ()) -> Callable:
        """Return a part of a step compiled; on a lazy device unchanged, as a step is one graph."""
        return function if self.lazy else self.compile(function, frozen_names=frozen_names)

    def compile_if_lazy(self, function: Callable) -> Callable:
        """Return small operations between graphs compiled on a lazy device, elsewhere unchanged."""
        return self.compile(function) if self.lazy else function

    @contextmanager
    def expect_graphs(self, needed: Iterable[Graph], print_line: Callable[[str], None]) -> Iterator[GraphBudget | None]:
        """Check calls in the block against the `needed` graphs, and print each one that is compiled.

        Yield None if nothing is compiled.
        """
        if not self.has_static_shapes:
            yield None
            return
        with self.ledger.expect_graphs(needed, strict=self.compiles_slowly) as budget:
            budget.on_graph = print_line
            print_line(f"graphs: {format_counts(budget.announced)} announced")
            yield budget
        print_line(f"graphs: {format_counts(budget.compiled)} compiled")

    def _compile_function(self, function: Callable, frozen_names: tuple[str, ...], kind: str) -> Callable:
        def keep_guards(guards: Sequence[Any]) -> list[bool]:
            return [not guard.name.startswith(frozen_names) for guard in guards]

        from torch._dynamo import config  # deferred: slow to import

        config.recompile_limit = MAX_GRAPHS_PER_FUNCTION
        if kind:
            function = _copy_with_name(function, f"{function.__name__}_{kind}")
        options: dict[str, Any] = {"guard_filter_fn": keep_guards} if frozen_names else {}
        if self.backend == "inductor":
            options |= self.inductor_options
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self.backend, options=options or None)

    def record(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Record what a function launches; return what launches it again and returns its results, always the same.

        The function must have run before, and must wait for nothing and copy nothing from the host.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_graph_pool()):
            results = function()

        def launch() -> Any:
            graph.replay()
            return results

        return launch

    @property
    def inductor_options(self) -> dict[str, Any]:
        """Return the options of Inductor, PyTorch's own compiler."""
        return {}

    @property
    def length_multiple(self) -> int:
        """Return the number that the length of training rows must be a multiple of.

        conf/machine has the same numbers.
        """
        return 128 if self.instance_type and self.name in ("neuron", "xla") else 1

    def eager(self) -> "Device":
        """Return a copy that compiles nothing, for work too little to compile for."""
        return replace(self, compiles=False, counts_shapes=False, records_rounds=False)

    def compile_region(self, function: Callable) -> Callable:
        """Return a part that occurs many times in a graph marked to be compiled once, where that is right."""
        return function

    @property
    def fuses_adamw(self) -> bool:
        """Return whether AdamW takes its step by a kernel for all weights."""
        return self.name == "cuda"

    @property
    def reads_pinned_memory(self) -> bool:
        """Return whether copies from pinned memory of the host go on beside it."""
        return self.name == "cuda"

    @property
    def scores_in_memory(self) -> bool:
        """Return whether no kernel attends with a mask, so that all scores are in memory."""
        return self.name in {"neuron", "xla"}

    def can_read_any_length(self, module: nn.Module) -> bool:  # noqa: ARG002
        """Return whether one graph of the module reads prompts of all lengths."""
        return False

    @property
    def packs_weights(self) -> bool:
        """Return whether `pack_weights` copies weights."""
        return False

    def pack_weights(self, module: nn.Module) -> None:
        """Prepare the frozen weights of a module for products of few rows, where that pays."""

    @contextmanager
    def cpu_threads_for(self, weights: int) -> Iterator[None]:
        """Use one CPU thread while passes read few tokens, if layers have few `weights`.

        Waking a second thread takes as long as such a layer does, and much longer if the machine
        has given its core to a different process. A number of threads that the user chose stays.
        """
        before = torch.get_num_threads()
        if self.torch_device.type == "cpu" and self.threads is None and weights < SMALL_LAYER_WEIGHTS:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def synchronize(self) -> None:
        """Wait until the device has finished, so that clocks measure completed work."""
        if self.torch_device.type != "cpu":
            torch.accelerator.synchronize()

    @staticmethod
    def count_graphs() -> int:
        """Return the number of graphs compiled in this process; it must not grow after warm-up."""
        from torch._dynamo.utils import counters  # deferred: slow to import

        return int(counters["stats"]["unique_graphs"])

    def describe(self) -> dict[str, Any]:
        """Return the hardware and the settings of a measurement, for its report."""
        kind = torch.cuda.get_device_name() if self.name == "cuda" else self.instance_type
        return {
            "name": self.name,
            "kind": kind or platform.processor() or platform.machine(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "compiled": self.compiles,
            "environment": self.environment,
        }


@functools.cache
def _graph_pool() -> Any:
    """Return the memory of all CUDA graphs, which share it because they run one after another."""
    return torch.cuda.graph_pool_handle()


@functools.cache
def _copy_with_name(function: Any, name: str) -> Callable:
    """Return a copy of a function with its own code object, by which PyTorch keeps graphs."""
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
