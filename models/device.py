"""Where tensors live and how functions are compiled: the only module that names hardware."""

import functools
import logging
import os
import platform
import shutil
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch._dynamo  # counters live here; importing it compiles nothing

from models.errors import UserError

log = logging.getLogger(__name__)
SMALL_LAYER = 1_000_000  # weights; one core reads so many in a fraction of a millisecond
GRAPHS_A_FUNCTION = 64  # prompt buckets x tree shapes; torch's own limit is 8, then it refuses


class DeviceName(Enum):
    """`auto` takes the accelerator that PyTorch sees, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    neuron = "neuron"
    xla = "xla"


class Precision(Enum):
    """Of the target and the runtime. The draft trains in fp32 masters whatever this is."""

    auto = "auto"  # float32 on a CPU, bfloat16 elsewhere
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True)
class Device:
    """A place to compute, and the few operations that differ between kinds of hardware."""

    name: str
    torch_device: torch.device
    dtype: torch.dtype
    compiles: bool
    backend: str = "inductor"
    threads: int | None = None  # of the CPU, where the user chose

    def compile(
        self, function: Callable, *, settled: tuple[str, ...] = (), kind: str = ""
    ) -> Callable:
        """One static graph without breaks where compiling is on, else the function itself.

        Graphs of another `kind` are kept apart: PyTorch holds each call against all graphs of a
        function, and fails where a module of another class has not what a graph had read.

        Before each call PyTorch makes sure that all the function has read is as it was. What lies
        below the `settled` names cannot change and is left out: for the 530 weights of a deep
        target the check takes as long as a quarter of a step.
        """
        if not self.compiles:
            return function

        def checked(guards: Sequence[Any]) -> list[bool]:
            return [not guard.name.startswith(settled) for guard in guards]

        torch._dynamo.config.recompile_limit = GRAPHS_A_FUNCTION
        if kind:
            function = _named(function, f"{function.__name__}_{kind}")
        options: Any = {"guard_filter_fn": checked} if settled else None
        return torch.compile(
            function, fullgraph=True, dynamic=False, backend=self.backend, options=options
        )

    def region(self, function: Callable) -> Callable:
        """A part that occurs many times in a graph and is compiled once, where that can be had."""
        if self.backend in ("neuron", "openxla"):
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
        if self.name == "xla":
            import torch_xla  # pyright: ignore[reportMissingImports]

            torch_xla.sync(wait=True)
        elif self.torch_device.type != "cpu":
            torch.accelerator.synchronize()

    def describe(self) -> dict[str, str | int]:
        """For the report: what ran the measurement."""
        kind = platform.processor() or platform.machine()
        if self.name == "cuda":
            kind = torch.cuda.get_device_name()
        return {
            "name": self.name,
            "kind": kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "compiled": self.compiles,
        }


@dataclass(kw_only=True)
class DeviceConf:
    """Which device, how precise, and whether to compile."""

    name: DeviceName = DeviceName.auto
    precision: Precision = Precision.auto
    compile: bool = True
    threads: int | None = None  # of the CPU; None: as PyTorch chooses, one to judge a tiny target

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UserError(
                f"device.threads: must be at least 1, got {self.threads}; null leaves the choice"
            )

    def build(self) -> Device:
        """Raises UserError where the named device is not there."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        name = _detect() if self.name is DeviceName.auto else self.name.value
        place = _place(name)
        precise = self.precision is Precision.float32 or (
            self.precision is Precision.auto and place.type == "cpu"
        )
        return Device(
            name=name,
            torch_device=place,
            dtype=torch.float32 if precise else torch.bfloat16,
            compiles=self.compile and _can_compile(name),
            backend={"neuron": "neuron", "xla": "openxla"}.get(name, "inductor"),
            threads=self.threads,
        )


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
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _detect() -> str:
    if os.environ.get("PJRT_DEVICE"):
        return "xla"
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else "cpu"


def _place(name: str) -> torch.device:
    if name == "xla":
        try:
            import torch_xla  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError(
                "device.name: torch_xla is not installed, got xla; install the `xla` extra"
            ) from None
        return torch_xla.device()
    if name != "cpu":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != name:
            there = "cpu" if found is None else f"cpu and {found.type}"
            raise UserError(f"device.name: PyTorch sees {there} here, got {name}; use device=auto")
    return torch.device(name)


@functools.cache
def _can_compile(name: str) -> bool:
    """Inductor needs a C++ compiler on a CPU; without one everything runs eagerly, said once."""
    if name != "cpu" or any(shutil.which(tool) for tool in ("g++", "clang++", "c++")):
        return True
    log.warning("no C++ compiler found: compiled parts run eagerly (install g++ for full speed)")
    return False
