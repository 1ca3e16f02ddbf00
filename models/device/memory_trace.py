"""Memory, operations and memory traffic of a computation, counted without computing it.

The functions of a run are called with PyTorch's fake tensors, which have shapes, types and
lifetimes but no memory: the tracer counts each operator's result when it is created and when it is
freed. A size that depends on data is the largest possible one.
"""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
LOGITS, ACTIVATIONS = "logits", "activations"


def count_attention(count: Callable[..., int], query_index: int) -> Callable[..., int]:
    """Return a count of attention's operations that takes fewer key-value heads than query heads.

    `query_index`: place of the query among the arguments, before key and value. PyTorch's own count
    of release 2.9 takes equal heads alone.

    >>> heads = count_attention(lambda query, key, value: key.shape[1], 0)
    >>> heads(torch.empty(1, 4, 3, 8), torch.empty(1, 2, 5, 8), torch.empty(1, 2, 5, 8))
    4
    """

    def count_grouped(*args: Any, **kwargs: Any) -> int:
        before, (query, key, value, *rest) = args[:query_index], args[query_index:]
        repeated = [state[:, :1].expand(-1, query.shape[1], -1, -1) for state in (key, value)]
        return count(*before, query, *repeated, *rest, **kwargs)

    return count_grouped


def count_experts(rows: Tensor, experts: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of rows that are each multiplied by the matrix of one expert."""
    return 2 * rows.numel() * experts.shape[-1]


def share_read_experts(rows: int, experts: int) -> float:
    """Return the share of experts that any of the rows chooses, if they choose by chance.

    >>> round(share_read_experts(4, 32), 3), round(share_read_experts(4096, 32), 3)
    (0.119, 1.0)
    """
    return 1 - (1 - 1 / experts) ** rows


MATMUL_FLOPS = flop_registry | {  # PyTorch counts attention only on accelerators, and no experts
    aten._grouped_mm: count_experts,
    aten._scaled_dot_product_flash_attention_for_cpu: count_attention(
        flop_registry[aten._scaled_dot_product_flash_attention], 0
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: count_attention(
        flop_registry[aten._scaled_dot_product_flash_attention_backward], 1
    ),
}


@dataclass(kw_only=True)
class TracedPhase:
    """A phase of a run: its peak memory and what it computes and moves."""

    name: str
    peak_bytes: Counter[str] = field(default_factory=Counter)  # by part, at the peak of the total
    flops_by_dtype: Counter[torch.dtype] = field(default_factory=Counter)  # of matrix products
    bytes_moved: int = 0  # by matrix products; other operations are fused with them
    bytes_read: Counter[str] = field(default_factory=Counter)  # by matrix products, by part
    bytes_exchanged: int = 0  # with other processes, by functional collectives

    def add_region(self, region: "TracedPhase", live_bytes: Counter[str], *, count: int = 1) -> None:
        """Count a region `count` times, which begins with `live_bytes` and whose peak is what it adds to them."""
        self.bytes_moved += count * region.bytes_moved
        self.bytes_exchanged += count * region.bytes_exchanged
        for name in ("flops_by_dtype", "bytes_read"):
            getattr(self, name).update({key: count * value for key, value in getattr(region, name).items()})
        peak = live_bytes.copy()
        peak.update(region.peak_bytes)
        if peak.total() > self.peak_bytes.total():
            self.peak_bytes = peak


class MemoryTracer(TorchDispatchMode):
    """A counter of the tensors that exist inside its block; `vocab` lists the widths of logits."""

    def __init__(self, vocab: Iterable[int]):
        super().__init__()
        self.vocab = set(vocab)
        # By storage of a mixture's weights: the experts of a layer. A core that holds some of them is given all rows
        # and multiplies those of its own.
        self.num_experts: dict[int, int] = {}
        self.live_bytes: Counter[str] = Counter()
        self._storages: dict[int, tuple[str, int]] = {}  # part and bytes by storage
        self._resized: dict[int, Any] = {}  # weak references to the storages that are resized
        self._phase = TracedPhase(name="")
        self._layers: dict[Any, tuple[TracedPhase, list[tuple[torch.Size, torch.dtype]], TreeSpec]] = {}  # and results

    @contextmanager
    def trace_phase(self, name: str) -> Iterator[TracedPhase]:
        """Trace the block as a phase that starts with the tensors alive now."""
        self._read_sizes()
        before, self._phase = self._phase, TracedPhase(name=name, peak_bytes=self.live_bytes.copy())
        yield self._phase
        self._phase = before

    @contextmanager
    def _trace_region(self) -> Iterator[TracedPhase]:
        """Trace the block apart from its phase; the peak is what it adds to the tensors alive before."""
        live_bytes = self.live_bytes.copy()
        with self.trace_phase("") as region:
            yield region
        region.peak_bytes.subtract(live_bytes)

    def run_layer(self, function: Callable, layer: nn.Module, *args: Any) -> Any:
        """Return what `function` returns for a layer; equal layers count like the first, which alone is computed.

        Layers are equal if their class and all shapes are: windows change neither what exists nor what is multiplied.
        """
        leaves = tree_leaves((*layer.parameters(), args))
        key = type(layer), *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._read_sizes()  # of weights that FSDP2 has gathered or freed since: no part of the region
        live_bytes = self.live_bytes.copy()
        if key in self._layers:
            region, sizes, spec = self._layers[key]
            result = tree_unflatten([torch.empty(size, dtype=dtype) for size, dtype in sizes], spec)
        else:
            with self._trace_region() as region:
                result = function(layer, *args)
            tensors, spec = tree_flatten(result)
            self._layers[key] = region, [(tensor.shape, tensor.dtype) for tensor in tensors], spec
        self._phase.add_region(region, live_bytes)
        return result

    def map_chunks(self, compute: Callable[[Any], Any], chunks: Sequence[Any]) -> list[Any]:
        """Return the results of equal chunks, of which only the first and the last are computed.

        The others count like the first, and tensors without values stand for their results. All
        earlier results exist beside the last chunk, so the peak is that of a full computation.
        """
        if len(chunks) < 3:
            return [compute(chunk) for chunk in chunks]
        live_bytes, skipped = self.live_bytes.copy(), len(chunks) - 2
        with self._trace_region() as region:
            results = [compute(chunks[0])]
        self._phase.add_region(region, live_bytes, count=1 + skipped)
        leaves, spec = tree_flatten(results[0])
        parts = [leaf.new_empty(skipped, *leaf.shape).unbind() for leaf in leaves]
        results += [tree_unflatten(values, spec) for values in zip(*parts, strict=True)]
        return [*results, compute(chunks[-1])]

    def label_tensors(self, part: str, tensors: Iterable[Tensor | None], *, resized: bool = False) -> None:
        """Assign tensors to a part; unlabeled ones are logits or activations.

        `resized`: FSDP2 frees and allocates these by resizing their storages, which is no operator.
        """
        for tensor in tensors:
            if tensor is None:
                continue
            self._record_tensor(tensor, part)
            if resized:
                storage = tensor.untyped_storage()
                self._resized[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is aten._local_scalar_dense.default:  # a number that the host reads
            return 1.0 if args[0].is_floating_point() else 1
        if func.namespace == "_c10d_functional" and "wait" in func.__name__:  # the same tensor, not another
            return args[0]
        if func is aten.nonzero.default:  # as if no element was zero
            return torch.arange(args[0].numel())[:, None].expand(-1, args[0].ndim)
        if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            # Experts: PyTorch knows the shape of the result in bfloat16 alone.
            result = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        # No pass multiplies DTensors, and what DTensor does inside is not seen.
        is_sharded = any(hasattr(tensor, "_local_tensor") for tensor in outputs)
        if not is_sharded and (count := MATMUL_FLOPS.get(func._overloadpacket)):
            flops = count(*args, **(kwargs or {}), out_val=result)
            inputs = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
            sizes = [count_distinct_bytes(tensor) for tensor in inputs]
            if func._overloadpacket is aten._grouped_mm:
                rows, experts, *_ = inputs
                total = self.num_experts.get(experts.untyped_storage()._cdata, len(experts))
                flops = flops * len(experts) // total
                sizes[1] = round(sizes[1] * share_read_experts(len(rows), total))
            # the type of the first output: attention has others for its backward pass
            self._phase.flops_by_dtype[outputs[0].dtype] += flops
            self._phase.bytes_moved += sum(sizes) + sum(tensor.nbytes for tensor in outputs)
            for tensor, size in zip(inputs, sizes, strict=True):
                storage_key = tensor.untyped_storage()._cdata
                part, _ = self._storages.get(storage_key, (ACTIVATIONS, 0))
                self._phase.bytes_read[part] += size
        if func.namespace == "_c10d_functional":
            # What a process sends and what it receives have one size, but for its own part.
            self._phase.bytes_exchanged += max(tensor.nbytes for tensor in (args[0], *outputs))
        for tensor in outputs:
            self._record_tensor(tensor, None)
        return result

    def _record_tensor(self, tensor: Tensor, part: str | None) -> None:
        """Count the tensor's storage until it is freed, or move it to `part` if already counted."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()  # a DTensor has no memory of its own
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            if part is None:
                return
            before, size = self._storages[key]
            self.live_bytes[before] -= size
        else:
            weakref.finalize(storage, self._record_free, key).atexit = False
        part = part or (LOGITS if tensor.shape[-1:].numel() in self.vocab else ACTIVATIONS)
        self._storages[key] = part, size
        self.live_bytes[part] += size
        if self.live_bytes.total() > self._phase.peak_bytes.total():
            self._read_sizes()
        if self.live_bytes.total() > self._phase.peak_bytes.total():
            self._phase.peak_bytes = self.live_bytes.copy()

    def _read_sizes(self) -> None:
        """Count the storages that are resized with their sizes of now."""
        for key, storage in self._resized.items():
            part, before = self._storages[key]
            self._storages[key] = part, storage().nbytes()
            self.live_bytes[part] += storage().nbytes() - before

    def _record_free(self, key: int) -> None:
        part, size = self._storages.pop(key)
        self._resized.pop(key, None)
        self.live_bytes[part] -= size


@contextmanager
def fake_model(
    modules: Iterable[nn.Module], *, vocab: Iterable[int], scores_in_memory: bool = False
) -> Iterator[MemoryTracer]:
    """Let modules built on `meta` compute in the block, as on a CPU but without memory.

    Their parameters and buffers are replaced by fake ones, and stay so. With `scores_in_memory`, attention is
    products and a softmax of all scores. Yield the tracer.
    """
    attention = sdpa_kernel(SDPBackend.MATH) if scores_in_memory else nullcontext()
    modules = [*modules]
    with FakeTensorMode(), attention, MemoryTracer(vocab) as tracer:
        fake_tensor = functools.cache(_fake_tensor)  # one per tensor: tied weights stay tied
        for owner in chain.from_iterable(module.modules() for module in modules):
            for tensors in (owner._parameters, owner._buffers):
                tensors.update((name, fake_tensor(tensor)) for name, tensor in [*tensors.items()])
        for module in modules:
            if experts := count_layer_experts(module):
                tracer.num_experts |= {p.untyped_storage()._cdata: experts for p in module.parameters()}
        del fake_tensor  # keeps every parameter alive
        yield tracer


def trace_once(run_layer: Callable) -> Callable:
    """Return a function of a layer that, where memory is traced, runs once for equal layers."""

    def run(*args: Any) -> Any:
        tracer = _get_current_dispatch_mode()
        return tracer.run_layer(run_layer, *args) if isinstance(tracer, MemoryTracer) else run_layer(*args)

    return run


def map_chunks(compute: Callable[[Any], Any], chunks: Sequence[Any]) -> list[Any]:
    """Return the results of all chunks; where memory is traced, few of them are computed."""
    tracer = _get_current_dispatch_mode()
    return tracer.map_chunks(compute, chunks) if isinstance(tracer, MemoryTracer) else [*map(compute, chunks)]


def count_distinct_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor without the copies that an expanded dimension stands for.

    >>> count_distinct_bytes(torch.zeros(8, 2).expand(4, 8, 2))
    64
    """
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.itemsize if tensor.numel() else 0


def count_layer_experts(model: Any) -> int:
    """Return the experts of a layer of a mixture, by the names of transformers' configurations; 0 for other models."""
    read_config = getattr(getattr(model, "config", None), "get_text_config", lambda: None)
    config = read_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, 0))), 0)


def _fake_tensor(tensor: Tensor | None) -> Any:
    """Return the fake tensor of a parameter or buffer."""
    if tensor is None or isinstance(tensor, FakeTensor):
        return tensor
    if (local := getattr(tensor, "_local_tensor", None)) is None:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    else:
        sharded: Any = tensor
        shape = {"shape": tensor.shape, "stride": tensor.stride()}
        fake = sharded.from_local(_fake_tensor(local), sharded.device_mesh, sharded.placements, **shape)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
