"""Which graphs a run compiles: announced before it starts, held against every call while it runs.

A graph is made for a function and a shape: the sizes and types of the tensors that it is given, and
everything else that is no number in a tensor, such as a tree or the layers to capture. A run is
strict where a graph can take an hour to compile: one that nobody announced is refused before it is
compiled. Elsewhere it is warned of, compiled and counted.
"""

import functools
import hashlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from textwrap import shorten
from typing import Any, NamedTuple

from torch import Tensor, nn

log = logging.getLogger(__name__)

KIND = ":"  # between a function and the kind of draft in it
Shape = tuple[tuple[Any, ...], ...]  # of each part of the arguments its name and what it is


class Graph(NamedTuple):
    """One that a run will need. Two that are equal are one graph."""

    function: str
    shape: tuple[Any, ...] = ()  # all that tells it from the other graphs of the function


class UnannouncedError(RuntimeError):
    """A function was called in one shape more than the run had announced."""


@dataclass(kw_only=True)
class Run:
    """Graphs by function: how many were announced, which shapes were called, how many compiled."""

    announced: Counter[str]
    strict: bool  # whether a graph that was not announced ends the run
    called: dict[str, dict[Shape, None]] = field(default_factory=dict)
    compiled: Counter[str] = field(default_factory=Counter)
    each: Callable[[str], None] | None = None  # told of every graph and its time
    late: int = 0  # of those compiled, but not while `warming`
    warming: bool = False
    warned: set[str] = field(default_factory=set)  # functions that had one graph more

    @property
    def unannounced(self) -> int:
        """Count the graphs beyond those announced, also where the process had announced ones."""
        needed = {name: max(len(s), self.compiled[name]) for name, s in self.called.items()}
        return (Counter(needed) - self.announced).total()

    def counts(self) -> dict[str, dict[str, int]]:
        """By function, for a report."""
        return {
            name: {"announced": self.announced[name], "compiled": self.compiled[name]}
            for name in sorted(self.announced | self.compiled)
        }

    def expect(self, function: str, shape: Shape) -> bool:
        """Whether the shape is new. If it is one more than announced, see `_one_more`."""
        known = self.called.setdefault(function, {})
        if shape in known:
            return False
        if len(known) >= self.announced[function]:
            self._one_more(function, described(shape, list(known)))
        known[shape] = None
        return True

    def made(self, function: str, count: int, shape: Shape, *, seconds: float) -> None:
        """So many were compiled for a call: more than announced is a shape compiled again."""
        if self.each is not None:
            others = [one for one in self.called[function] if one != shape]
            what = shorten(described(shape, others), 120, placeholder=" ...")
            self.each(f"graph: {seconds:6.1f} s  {function}  {what}")
        self.compiled[function] += count
        self.late += 0 if self.warming else count
        if self.compiled[function] > self.announced[function]:
            again = "the same shape again, because something else has changed that it reads"
            self._one_more(function, f"{again} (TORCH_LOGS=recompiles): {described(shape)}")

    def _one_more(self, function: str, why: str) -> None:
        """Raise UnannouncedError in a strict run; in others warn, once a function."""
        count = self.announced[function]
        what = f"graphs: {function} has {count} announced, got one more: {why}"
        if self.strict:
            raise UnannouncedError(what)
        if function not in self.warned:
            log.warning("%s; further ones of it are counted alone", what)
        self.warned.add(function)


class Ledger:
    """Of one device. Calls are held against a run inside `expecting`, and free elsewhere."""

    def __init__(self) -> None:
        self.run: Run | None = None

    @contextmanager
    def expecting(self, graphs: Iterable[Graph], *, strict: bool) -> Iterator[Run]:
        """A run that needs these graphs and no others; `strict` ends it at the first other one."""
        announced = Counter(g.function for g in set(graphs))
        before, self.run = self.run, Run(announced=announced, strict=strict)
        try:
            yield self.run
        finally:
            self.run = before

    @contextmanager
    def warming(self) -> Iterator[None]:
        """What is compiled meanwhile is not late."""
        run = self.run or Run(announced=Counter(), strict=False)
        before, run.warming = run.warming, True
        try:
            yield
        finally:
            run.warming = before

    def counted(
        self, function: Callable, *, of: Callable, name: str, made: Callable[[], int] | None
    ) -> Callable:
        """`function`, made `of` another, each call of which is held against the run.

        `made` says how many graphs its backend has compiled so far; None: one for each shape.
        """
        names = list(inspect.signature(of).parameters)
        fixed: dict[int, tuple[Any, str]] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            run = self.run
            if run is None:
                return function(*args, **kwargs)
            shape = shape_of(dict(zip(names, args, strict=False)) | kwargs, fixed)
            new = run.expect(name, shape)
            before, began = made() if made else 0, time.perf_counter()
            result = function(*args, **kwargs)
            if count := made() - before if made else int(new):
                run.made(name, count, shape, seconds=time.perf_counter() - began)
            return result

        return call


def shape_of(args: dict[str, Any], fixed: dict[int, tuple[Any, str]]) -> Shape:
    """Everything about a call's arguments that graphs are made for, with its name.

    What is neither a tensor, nor made of parts that may change, is looked at once, and then held in
    `fixed`: a model, a cache, a plan.

    >>> import torch
    >>> shape_of({"ids": torch.zeros(1, 4), "layers": [1, 3]}, {})
    (('ids', torch.Size([1, 4]), torch.float32), ('layers', (1, 3)))
    """
    found: list[tuple[Any, ...]] = []
    for name, value in args.items():
        _walk(name, value, found, fixed)
    return tuple(found)


def _walk(
    path: str, value: Any, found: list[tuple[Any, ...]], fixed: dict[int, tuple[Any, str]]
) -> None:
    kind = type(value)
    if isinstance(value, Tensor):
        found.append((path, value.shape, value.dtype))
    elif kind is dict:
        for name, part in value.items():
            _walk(f"{path}.{name}", part, found, fixed)
    elif kind is tuple:
        for place, part in enumerate(value):
            _walk(f"{path}.{place}", part, found, fixed)
    elif kind is list:  # of numbers
        found.append((path, tuple(value)))
    elif value is None or kind in (bool, int, float, str):
        found.append((path, value))
    elif id(value) in fixed:
        found.append((path, fixed[id(value)][1]))
    elif parts := _changing(kind):
        for name in parts:
            _walk(f"{path}.{name}", getattr(value, name), found, fixed)
    else:
        fixed[id(value)] = value, key_of(value)
        found.append((path, fixed[id(value)][1]))


@functools.cache
def _changing(kind: type) -> tuple[str, ...]:
    """Names of the parts of a dataclass of tensors."""
    if not is_dataclass(kind) or hasattr(kind, "graph_key"):
        return ()
    return tuple(f.name for f in fields(kind))


def key_of(value: Any) -> str:
    """What graphs depend on of something that cannot change, in some words.

    A class says it by a property `graph_key`; of modules it is their class and their tensors.
    """
    if not isinstance(value, nn.Module):
        return value.graph_key
    tensors = [*value.named_parameters(), *value.named_buffers()]
    listed = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors]
    digest = hashlib.sha256(str(listed).encode()).hexdigest()[:8]
    return f"{type(value).__name__} {digest}"


def described(shape: Shape, known: Sequence[Shape] = ()) -> str:
    """In words; beside known ones what is new in it.

    >>> from torch import Size, int64
    >>> known = [(("ids", Size([1, 64]), int64), ("layers", (1, 3)))]
    >>> described((("ids", Size([1, 96]), int64), ("layers", (1, 3))), known)
    'ids [1, 96] int64'
    """
    least = min((set(shape) - set(one) for one in known), key=len, default=set(shape))
    return ", ".join(" ".join(map(_word, part)) for part in shape if part in least)


def _word(part: Any) -> str:
    return str(list(part) if isinstance(part, tuple) else part).removeprefix("torch.")


def listed(counts: Mapping[str, int]) -> str:
    """Graphs by function, kinds of one function together.

    >>> listed({"fused:eagle3": 2, "fused:alone": 1, "prefill": 2})
    '5 (fused 3, prefill 2)'
    """
    together: Counter[str] = Counter()
    for name, count in counts.items():
        together[name.partition(KIND)[0]] += count
    parts = ", ".join(f"{name} {count}" for name, count in sorted(together.items()))
    return f"{together.total()} ({parts})" if parts else "none"
