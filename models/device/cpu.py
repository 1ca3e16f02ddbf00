"""The device of a CPU: if it compiles, linear layers multiply by weights packed as oneDNN wants them.

A decoding pass multiplies few rows by every weight. With packed weights, several rows take about as long as one,
which PyTorch's own products reach neither in fp32 nor in bf16: docs/decoding.md.

A compiled graph cannot take packed weights as its inputs. They are held in a table, and graphs take their keys.
Layers that read the same input share a packed copy of their weights. Each takes its part of the product with all of
them, which a graph computes once.
"""

import ctypes
import functools
import itertools
import platform
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from models.device.device import Device

# oneDNN takes 12 microseconds a call and MKL one: equal at about this many weights, for 1 and for 5 rows.
MIN_PACKED_WEIGHTS = 100_000
HINTED_ROWS = 16  # that oneDNN chooses the packed format for; any number can be multiplied
# Bytes by the options of glibc's mallopt: a block of more comes from the kernel and goes back when freed; a free end of
# the heap of more goes back. By default at most 32 and 64 MiB, less than a chunk of logits.
MALLOC_OPTIONS = {-3: 64 * 2**20, -1: 256 * 2**20}
# Layers of one module that read the same input, by their names in transformers.
INPUTS = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}
_packed_layers: dict[int, tuple[Tensor, Tensor | None]] = {}  # weights and biases
_keys = itertools.count()
_library = torch.library.Library("draftsmith", "DEF")
_library.define("packed_linear(Tensor input, Tensor key, int out_features) -> Tensor")


def _multiply_packed(input: Tensor, key: Tensor, out_features: int) -> Tensor:  # noqa: ARG001
    return torch.ops.mkldnn._linear_pointwise(input, *_packed_layers[int(key)], "none", [], "")


def _allocate_product(input: Tensor, key: Tensor, out_features: int) -> Tensor:  # noqa: ARG001
    return input.new_empty(*input.shape[:-1], out_features)


_library.impl("packed_linear", _multiply_packed, "CPU")
torch.library.register_fake("draftsmith::packed_linear", _allocate_product, lib=_library)


class CpuDevice(Device):
    """A CPU, which packs the weights that its graphs multiply few rows by."""

    @property
    def packs_weights(self) -> bool:
        return self.compiles

    @property
    def inductor_options(self) -> dict[str, Any]:
        return {"cpp.simdlen": _find_vector_width(), "post_grad_custom_pre_pass": _build_merging_pass()}

    def compile_region(self, function: Callable) -> Callable:
        # Not on CUDA, where Inductor pads strides: a region read keys by other strides than it had written them by.
        return torch.compiler.nested_compile_region(function)

    def pack_weights(self, module: nn.Module) -> None:
        if self.compiles:
            pack_linear_layers(module)

    def can_read_any_length(self, module: nn.Module) -> bool:
        # In a region, PyTorch's product with a bias makes a constant of the length (2.9 to 2.13).
        linear_layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        return self.compiles and all(layer.bias is None or hasattr(layer, "packed_key") for layer in linear_layers)


def keep_freed_memory() -> None:
    """Let the process use freed memory again in place of pages that the kernel must clear first, if its libc can."""
    if platform.libc_ver()[0] == "glibc":
        for option, size in MALLOC_OPTIONS.items():
            ctypes.CDLL(None).mallopt(option, size)


def pack_linear_layers(module: nn.Module) -> None:
    """Let the large linear layers of a module whose weights are frozen multiply by packed copies of them."""
    for layers in _find_large_layers(module):
        if all(_is_frozen(layer) and not hasattr(layer, "packed_key") for layer in layers):
            _pack_together(layers)


def count_packed_bytes(module: nn.Module) -> int:
    """Return the bytes that packed copies of a module's weights take."""
    return sum(layer.weight.nbytes for layers in _find_large_layers(module) for layer in layers)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is there and computes with this type on this CPU; it was tried on x86 alone."""
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_large(*weights: Tensor) -> bool:
    """Return whether weights that read the same input are many enough to be packed."""
    return sum(weight.numel() for weight in weights) >= MIN_PACKED_WEIGHTS


def _find_large_layers(module: nn.Module) -> list[list[nn.Linear]]:
    """Return the layers that have many weights, those together that read the same input."""
    groups = defaultdict(list)
    for path, layer in module.named_modules():
        if type(layer) is nn.Linear and can_pack(layer.weight.dtype):
            parent, _, name = path.rpartition(".")
            groups[parent, INPUTS.get(name, name), layer.in_features, layer.bias is None].append(layer)
    return [layers for layers in groups.values() if is_large(*(layer.weight for layer in layers))]


def _is_frozen(layer: nn.Linear) -> bool:
    is_plain = type(layer.weight.data) is Tensor  # neither fake nor spread over processes
    return is_plain and not any(parameter.requires_grad for parameter in layer.parameters())


def _pack_together(layers: list[Any]) -> None:
    """Let linear layers of the same input multiply by one packed copy of their weights."""
    key, begin = next(_keys), 0
    weight = _concatenate([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else _concatenate([layer.bias for layer in layers])
    _packed_layers[key] = torch.ops.mkldnn._reorder_linear_weight(weight, HINTED_ROWS), bias
    key_tensor = torch.tensor(key)  # the same for all, by which a graph knows that their products are equal
    for layer in layers:
        weakref.finalize(layer, _packed_layers.pop, key, None)
        layer.register_buffer("packed_key", key_tensor, persistent=False)
        layer.packed_begin, layer.packed_size = begin, len(weight)
        layer.forward = MethodType(_forward_packed, layer)
        begin += layer.out_features


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)  # which would copy a single one


def _forward_packed(self: Any, input: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch outputs"]:
    is_shared = self.packed_size > self.out_features
    # oneDNN's product has no gradient. Outside graphs, each layer would compute the outputs of its siblings, too.
    if torch.is_grad_enabled() or (is_shared and not torch.compiler.is_compiling()):
        return F.linear(input, self.weight, self.bias)
    product = torch.ops.draftsmith.packed_linear(input, self.packed_key, self.packed_size)
    return product.narrow(-1, self.packed_begin, self.out_features)


@functools.cache
def _build_merging_pass() -> Any:
    """Build the pass by which Inductor computes equal products once, as its own passes do in training alone."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # deferred: slow to import

    class MergingPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            products: dict[Any, torch.fx.Node] = {}
            for node in graph.find_nodes(op="call_function", target=torch.ops.draftsmith.packed_linear.default):
                product = products.setdefault(node.args, node)
                if product is not node:
                    node.replace_all_uses_with(product)
                    graph.erase_node(node)

        def uuid(self) -> Any:  # a part of the key by which Inductor caches graphs
            return get_hash_for_files((__file__,))

    return MergingPass()


@functools.cache
def _find_vector_width() -> int:
    """Return the width in bits of the vectors that Inductor computes with.

    As one of its options, the width is part of the key by which Inductor caches graphs. PyTorch
    2.13 leaves it out, and then returns code of the other width; see docs/graphs.md.
    """
    from torch._inductor import cpu_vec_isa  # deferred: slow to import

    return cpu_vec_isa.pick_vec_isa().bit_width()
