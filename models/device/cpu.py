"""The device of a CPU: if it compiles, linear layers multiply by weights packed as oneDNN wants them.

A decoding pass multiplies few rows by every weight. With packed weights, several rows take about as long as one,
which PyTorch's own products reach neither in fp32 nor in bf16: docs/decoding.md.

A compiled graph cannot take packed weights as its inputs. They are held in a table, and graphs take their keys.
"""

import itertools
import platform
import weakref
from collections.abc import Callable, Iterator
from types import MethodType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from models.device.device import Device

# oneDNN takes 12 microseconds a call and MKL one: equal at about this many weights, for 1 and for 5 rows.
MIN_PACKED_WEIGHTS = 100_000
HINTED_ROWS = 16  # that oneDNN chooses the packed format for; any number can be multiplied
_packed_weights: dict[int, Tensor] = {}
_keys = itertools.count()
_library = torch.library.Library("draftsmith", "DEF")
_library.define("packed_linear(Tensor input, Tensor key, Tensor? bias, int out_features) -> Tensor")


def _multiply_packed(input: Tensor, key: Tensor, bias: Tensor | None, out_features: int) -> Tensor:  # noqa: ARG001
    return torch.ops.mkldnn._linear_pointwise(input, _packed_weights[int(key)], bias, "none", [], "")


def _allocate_product(input: Tensor, key: Tensor, bias: Tensor | None, out_features: int) -> Tensor:  # noqa: ARG001
    return input.new_empty(*input.shape[:-1], out_features)


_library.impl("packed_linear", _multiply_packed, "CPU")
torch.library.register_fake("draftsmith::packed_linear", _allocate_product, lib=_library)


class CpuDevice(Device):
    """A CPU, which packs the weights that its graphs multiply few rows by."""

    @property
    def packs_weights(self) -> bool:
        return self.compiles

    def compile_region(self, function: Callable) -> Callable:
        # Not on CUDA, where Inductor pads strides: a region read keys by other strides than it had written them by.
        return torch.compiler.nested_compile_region(function)

    def pack_weights(self, module: nn.Module) -> None:
        if self.compiles:
            pack_linear_layers(module)


def pack_linear_layers(module: nn.Module) -> None:
    """Let the large linear layers of a module whose weights are frozen multiply by packed copies of them."""
    for layer in _find_large_layers(module):
        is_plain = type(layer.weight.data) is Tensor  # neither fake nor spread over processes
        if is_plain and not layer.weight.requires_grad and not hasattr(layer, "packed_key"):
            key = next(_keys)
            _packed_weights[key] = torch.ops.mkldnn._reorder_linear_weight(layer.weight, HINTED_ROWS)
            weakref.finalize(layer, _packed_weights.pop, key, None)
            layer.register_buffer("packed_key", torch.tensor(key), persistent=False)
            layer.forward = MethodType(_forward_packed, layer)


def count_packed_bytes(module: nn.Module) -> int:
    """Return the bytes that packed copies of a module's weights take."""
    return sum(layer.weight.nbytes for layer in _find_large_layers(module))


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is there and computes with this type on this CPU; it was tried on x86 alone."""
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _find_large_layers(module: nn.Module) -> Iterator[nn.Linear]:
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= MIN_PACKED_WEIGHTS and can_pack(layer.weight.dtype):
            yield layer


def _forward_packed(self: nn.Linear, input: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch outputs"]:
    if torch.is_grad_enabled():  # oneDNN's product has no gradient
        return F.linear(input, self.weight, self.bias)
    return torch.ops.draftsmith.packed_linear(input, self.packed_key, self.bias, self.out_features)
