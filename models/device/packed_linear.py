"""Linear layers of a CPU that compiles, with weights packed as oneDNN wants them.

A decoding pass multiplies few rows by every weight. With packed weights, several rows take about as long as one,
which the products of PyTorch's compiler reach neither in fp32 nor in bf16 (docs/decoding.md).

A compiled graph cannot take packed weights as its inputs. They are kept in a table, and graphs take their keys.
"""

import itertools
import platform
import weakref
from collections.abc import Iterator
from types import MethodType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# oneDNN takes 12 microseconds a call and MKL one: equal at about this many weights, for 1 and for 5 rows.
MIN_PACKED_WEIGHTS = 100_000
HINTED_ROWS = 16  # that oneDNN chooses the packed format for; any number can be multiplied
_PACKED: dict[int, Tensor] = {}
_keys = itertools.count()
_library = torch.library.Library("draftsmith", "DEF")
_library.define("packed_linear(Tensor input, Tensor key, Tensor? bias, int out_features) -> Tensor")


def _multiply(input: Tensor, key: Tensor, bias: Tensor | None, out_features: int) -> Tensor:  # noqa: A002, ARG001
    return torch.ops.mkldnn._linear_pointwise(input, _PACKED[key.item()], bias, "none", [], "")


def _allocate_product(input: Tensor, key: Tensor, bias: Tensor | None, out_features: int) -> Tensor:  # noqa: A002, ARG001
    return input.new_empty(*input.shape[:-1], out_features)


_library.impl("packed_linear", _multiply, "CPU")
torch.library.register_fake("draftsmith::packed_linear", _allocate_product, lib=_library)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is there and computes with this type on this CPU; it was tried on x86 alone."""
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear_layers(module: nn.Module) -> None:
    """Let the large linear layers of a module whose weights are frozen multiply by packed copies of them."""
    for layer in _find_large_layers(module):
        is_plain = type(layer.weight.data) is Tensor  # neither fake nor spread over processes
        if is_plain and not layer.weight.requires_grad and not hasattr(layer, "packed_key"):
            key = next(_keys)
            _PACKED[key] = torch.ops.mkldnn._reorder_linear_weight(layer.weight, HINTED_ROWS)
            weakref.finalize(layer, _PACKED.pop, key, None)
            layer.register_buffer("packed_key", torch.tensor(key), persistent=False)
            layer.forward = MethodType(_forward_packed, layer)


def count_packed_bytes(module: nn.Module) -> int:
    """Return the bytes that packed copies of a module's weights take."""
    return sum(layer.weight.nbytes for layer in _find_large_layers(module))


def _find_large_layers(module: nn.Module) -> Iterator[nn.Linear]:
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= MIN_PACKED_WEIGHTS and can_pack(layer.weight.dtype):
            yield layer


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is there and computes with this type on this CPU; it was tried on x86 alone."""
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear_layers(module: nn.Module) -> None:
    """Let the large frozen linear layers of a module multiply by packed copies of their weights."""
    for layer in find_packable_layers(module):
        if not hasattr(layer, "packed_key"):
            key = next(_keys)
            _PACKED[key] = torch.ops.mkldnn._reorder_linear_weight(layer.weight, HINTED_ROWS)
            weakref.finalize(layer, _PACKED.pop, key, None)
            layer.register_buffer("packed_key", torch.tensor(key), persistent=False)
            layer.forward = MethodType(_forward_packed, layer)


def find_packable_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers that gain, whose weights do not change, are not spread over processes and not fake."""
    for layer in module.modules():
        if type(layer) is not nn.Linear or layer.weight.requires_grad or layer.weight.numel() < MIN_PACKED_WEIGHTS:
            continue
        if type(layer.weight.data) is Tensor and can_pack(layer.weight.dtype):
            yield layer


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is there and computes with this type on this CPU; it was tried on x86 alone."""
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _forward_packed(
    self: nn.Linear,
    input: Float[Tensor, "*batch in_features"],  # noqa: A002
) -> Float[Tensor, "*batch out_features"]:
    if torch.is_grad_enabled():  # oneDNN's product has no gradient
        return F.linear(input, self.weight, self.bias)
    return torch.ops.draftsmith.packed_linear(input, self.packed_key, self.bias, self.out_features)
