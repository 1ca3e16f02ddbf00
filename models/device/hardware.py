"""A place to compute: where tensors live, how functions are compiled, how a clock waits."""

import functools
import platform
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo  # counters live here; importing it compiles nothing

from models.device import lazy
from models.device.graph_budget import KIND, Graph, Ledger, Run, listed

SMALL_LAYER = 1_000_000  # weights; one core reads so many in a fraction of a millisecond
GRAPHS_A_FUNCTION = 64  # prompt buckets x tree shapes; torch's own limit is 8, then it refuses


@dataclass(kw_only=True)
class Device:
    """A place to compute, and the few operations that differ between kinds of hardware."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    compiles: bool
    backend: str = "inductor"
    threads: int | None = None  # of the CPU, where the user chose
    instance: str | None = None  # EC2's type of a Trainium or Inferentia machine
    environment: dict[str, str] = field(default_factory=dict)  # what compiler and runtime read
    counts: bool = False  # shapes of calls also where nothing is compiled
    ledger: Ledger = field(default_factory=Ledger, compare=False, repr=False)

    @property
    def static(self) -> bool:
        """Whether calls are to be of few shapes."""
        return self.compiles or self.counts

    def compile(
        self, function: Callable, *, settled: tuple[str, ...] = (), kind: str = ""
    ) -> Callable:
        """One static graph without breaks where compiling is on, else the function itself.

        Inside `expecting` a call that needs a graph more than announced is refused where a graph
        takes long, and counted elsewhere.

        Graphs of another `kind` are kept apart: PyTorch holds each call against all graphs of a
        function, and fails where a module of another class has not what a graph had read.

        Before each call PyTorch makes sure that all the function has read is as it was. What lies
        below the `settled` names cannot change and is left out: for the 530 weights of a deep
        target the check takes as long as a quarter of a step.
        """
        name = f"{function.__name__}{KIND}{kind}" if kind else function.__name__
        if self.compiles:
            compiled = self._compiled(function, settled, kind)
            return self.ledger.counted(compiled, of=function, name=name, made=graphs)
        if self.counts:
            return self.ledger.counted(function, of=function, name=name, made=None)
        return function

    @contextmanager
    def expecting(
        self,
        needed: Iterable[Graph],
        say: Callable[[str], None],
        *,
        each: Callable[[str], None] | None = None,
    ) -> Iterator[Run | None]:
        """A run that needs these graphs and no others; None where none are made.

        It says how many they are, and in the end how many were compiled: fewer where this process
        had some of them already. `each` is told of every graph and its time.
        """
        if not self.static:
            yield None
            return
        with self.ledger.expecting(needed, strict=self.compiles_slowly) as run:
            run.each = each
            say(f"graphs: {listed(run.announced)} announced")
            yield run
        say(f"graphs: {listed(run.compiled)} compiled")

    def _compiled(self, function: Callable, settled: tuple[str, ...], kind: str) -> Callable:
        if self.lazy:
            return lazy.traced(function)

        def checked(guards: Sequence[Any]) -> list[bool]:
            return [not guard.name.startswith(settled) for guard in guards]

        torch._dynamo.config.recompile_limit = GRAPHS_A_FUNCTION
        if kind:
            function = _named(function, f"{function.__name__}_{kind}")
        options: dict[str, Any] = {"guard_filter_fn": checked} if settled else {}
        if self.name == "cpu" and self.backend == "inductor":
            options["cpp.simdlen"] = _vector_width()
        return torch.compile(
            function, fullgraph=True, dynamic=False, backend=self.backend, options=options or None
        )

    @property
    def length_multiple(self) -> int:
        """What the length of a training row is a multiple of, as in conf/machine."""
        return 128 if self.instance and self.name in ("neuron", "xla") else 1

    @property
    def compiles_slowly(self) -> bool:
        """Whether one graph can take an hour: shapes are then fixed, and others are refused."""
        return self.name in ("neuron", "xla")

    @property
    def lazy(self) -> bool:
        """Whether operations are recorded, and computed as one graph at the next sync."""
        return self.name == "xla"

    def eager(self) -> "Device":
        """The same for little work, which compiling would only delay.

        Where operations are recorded there is no other way; its graphs are held against no run.
        """
        if self.lazy:
            return replace(self, ledger=Ledger())
        return replace(self, compiles=False, counts=False)

    def glue(self, function: Callable) -> Callable:
        """Small operations between graphs: a graph too where all is recorded, else one by one."""
        return self.compile(function) if self.lazy else function

    def region(self, function: Callable) -> Callable:
        """A part that occurs many times in a graph and is compiled once, where that can be had."""
        if self.lazy or self.backend == "neuron":
            return function
        return torch.compiler.nested_compile_region(function)

    @property
    def fuses(self) -> bool:
        """Whether a whole round is one graph, where nobody says."""
        return True

    @contextmanager
    def shared_if_worth(self, weights: int) -> Iterator[None]:
        """One CPU thread while passes read few tokens and so few `weights` a layer.

        Waking a second thread takes as long as such a layer does, and much longer where the machine
        gives its core to someone else at that moment. Where the user chose, nothing is changed.
        """
        before = torch.get_num_threads()
        if self.torch_device.type == "cpu" and self.threads is None and weights < SMALL_LAYER:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def synchronize(self) -> None:
        """Wait until the device has finished, so that a clock reads the truth."""
        if self.lazy:
            lazy.sync(wait=True)
        elif self.torch_device.type != "cpu":
            torch.accelerator.synchronize()

    def describe(self) -> dict[str, Any]:
        """For the report: what ran the measurement, and with which settings."""
        kind = self.instance or platform.processor() or platform.machine()
        if self.name == "cuda":
            kind = torch.cuda.get_device_name()
        return {
            "name": self.name,
            "kind": kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "compiled": self.compiles,
            "environment": self.environment,
        }


@functools.cache
def _vector_width() -> int:
    """Return the bits of the vectors that Inductor computes with.

    Named among its options, they are part of the key by which it caches graphs. PyTorch 2.13 leaves
    them out, so that one cache used with two values of ATEN_CPU_CAPABILITY hands out code of the
    other width: it does not compile, or computes something else.
    """
    from torch._inductor import cpu_vec_isa  # slow to import

    return cpu_vec_isa.pick_vec_isa().bit_width()


@functools.cache
def _named(function: Any, name: str) -> Callable:
    """The same function with code of its own, which is what PyTorch keeps graphs by."""
    code = function.__code__.replace(co_name=name)
    named = types.FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    named.__kwdefaults__ = function.__kwdefaults__
    return named


def graphs() -> int:
    """Graphs compiled so far in this process. It must not grow after warm-up."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) + lazy.compiled()
