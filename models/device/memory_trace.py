"""What a computation holds, computes and moves, counted without doing it.

The very functions of a run are called with PyTorch's fake tensors, which have shapes, types and
lifetimes but no memory: each operator's result is booked when it is made and again when it is
freed. What depends on data is taken at its largest.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
LOGITS, REST = "logits", "activations"
PRODUCTS = flop_registry | {  # PyTorch counts attention on accelerators alone
    aten._scaled_dot_product_flash_attention_for_cpu:
        flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward:
        flop_registry[aten._scaled_dot_product_flash_attention_backward],
}  # fmt: skip


@dataclass(kw_only=True)
class Phase:
    """A part of a run: what is held at its fullest moment, and what it costs."""

    name: str
    held: Counter[str] = field(default_factory=Counter)  # bytes by part
    operations: Counter[torch.dtype] = field(default_factory=Counter)  # of matrix products
    moved: int = 0  # bytes that matrix products read and write; what lies between is fused
    read: Counter[str] = field(default_factory=Counter)  # of these by the part that is read

    @property
    def total(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.held.values())

    @property
    def flops(self) -> int:
        return sum(self.operations.values())


class Tally(TorchDispatchMode):
    """Books every tensor that is made while it is entered. `vocab`: widths that mean logits."""

    def __init__(self, vocab: Iterable[int]):
        super().__init__()
        self.vocab = set(vocab)
        self.live: Counter[str] = Counter()
        self._books: dict[int, tuple[str, int]] = {}  # a storage's part and bytes
        self._phase = Phase(name="")

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """What happens inside, from what is held already."""
        self._phase = found = Phase(name=name, held=self.live.copy())
        yield found
        self._phase = Phase(name="")

    def hold(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Say what tensors are; others are logits, or else activations."""
        for tensor in tensors:
            if tensor is not None:
                self._book(tensor, part)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:  # a number that the host reads
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten.nonzero.default:
            return torch.arange(args[0].numel())[:, None].expand(-1, args[0].ndim)
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        if count := PRODUCTS.get(func._overloadpacket):
            # the first result: attention has others, for its backward pass
            self._phase.operations[made[0].dtype] += count(*args, **(kwargs or {}), out_val=result)
            read = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
            self._phase.moved += sum(tensor.nbytes for tensor in read + made)
            for tensor in read:
                self._phase.read[self._part(tensor)] += tensor.nbytes
        for tensor in made:
            self._book(tensor, None)
        return result

    def _part(self, tensor: Tensor) -> str:
        part, _ = self._books.get(tensor.untyped_storage()._cdata, (REST, 0))
        return part

    def _book(self, tensor: Tensor, part: str | None) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._books:
            if part is None:
                return
            before, size = self._books[key]
            self.live[before] -= size
        else:
            weakref.finalize(storage, self._free, key).atexit = False
        part = part or (LOGITS if tensor.shape[-1:].numel() in self.vocab else REST)
        self._books[key] = part, size
        self.live[part] += size
        if self.live.total() > self._phase.held.total():
            self._phase.held = self.live.copy()

    def _free(self, key: int) -> None:
        part, size = self._books.pop(key)
        self.live[part] -= size


@contextmanager
def imagined(modules: Iterable[nn.Module], *, vocab: Iterable[int]) -> Iterator[Tally]:
    """Inside, modules that were built on `meta` compute as on a CPU, on tensors without memory."""
    with FakeTensorMode(), Tally(vocab) as tally:
        stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # the first keeps the id from being reused
        for module in modules:
            for part in module.modules():
                for tensors in (part._parameters, part._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            tensors[name] = _stand_in(tensor, stand_ins)
        yield tally


def _stand_in(tensor: Tensor, known: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The same one for parameters that are tied."""
    if id(tensor) not in known:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        known[id(tensor)] = tensor, made
        known[id(made)] = made, made
    return known[id(tensor)][1]
