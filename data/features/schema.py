"""Schema of a feature store: the tensors of each token, and the quantization of hidden states.

    captured             L x H     inputs         the layers that enter the draft
    hidden               H         inputs, or supervised: teacher=hidden
    teacher.ids          k int32   supervised     teacher=topk: the k likeliest tokens,
    teacher.log_probs    k fp16    supervised     their log-probabilities at temperature 1
    teacher.rest         fp32      supervised     and the mass of all others

Inputs of methods that read context have a row for every token, all else for supervised tokens: those of answers and the
token before each. A hidden state of one layer at one token has its own scale, in fp32, since rows of an early layer may
be as small as 1e-3 (a scale of 8e-6, below fp16's normal numbers). docs/features.md compares the types.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from data.config import CaptureConf, Dtype, TeacherKind
from models.drafts.base import Needs
from models.io.errors import require

SMALLEST = torch.finfo(torch.float32).tiny  # avoids dividing a row of zeros by 0
SCALE_SUFFIX = ".scale"  # follows the name of the scaled tensor


TORCH_DTYPES = {Dtype.bf16: torch.bfloat16, Dtype.int8: torch.int8, Dtype.fp8: torch.float8_e4m3fn}  # of stored values


class TensorSpec(NamedTuple):
    """The name, shape and type of one tensor of a shard."""

    name: str
    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype
    per_token: bool  # a row for each token; otherwise for supervised tokens only


@dataclass(frozen=True, kw_only=True)
class FeatureSchema:
    """The features that a store holds of each token, and their storage types."""

    layers: list[int]
    hidden: bool  # the final hidden state is an input
    context: bool  # inputs of every token
    dtype: Dtype
    teacher: TeacherKind
    top_k: int  # of teacher=topk
    hidden_size: int
    vocab_size: int
    on_prompts: bool = False  # the tokens of prompts are supervised too; not recorded by older stores

    @property
    def tensor_specs(self) -> list[TensorSpec]:
        """List the tensors of a shard."""
        specs = []
        if self.layers:
            specs += self._hidden_state_specs("captured", len(self.layers), per_token=self.context)
        if self.hidden or self.teacher is TeacherKind.hidden:
            specs += self._hidden_state_specs("hidden", per_token=self.hidden and self.context)
        if self.teacher is TeacherKind.topk:
            specs += [
                TensorSpec("teacher.ids", (self.top_k,), torch.int32, per_token=False),
                TensorSpec("teacher.log_probs", (self.top_k,), torch.float16, per_token=False),
                TensorSpec("teacher.rest", (), torch.float32, per_token=False),
            ]
        return specs

    def _hidden_state_specs(self, name: str, *rows: int, per_token: bool) -> list[TensorSpec]:
        values = TensorSpec(name, (*rows, self.hidden_size), TORCH_DTYPES[self.dtype], per_token)
        scales = TensorSpec(name + SCALE_SUFFIX, rows, torch.float32, per_token)
        return [values] if self.dtype.max_value is None else [values, scales]

    def num_bytes(self, tokens: int, supervised: int) -> int:
        """Return the bytes of the features of `tokens` tokens, `supervised` of them supervised."""
        return sum(
            (tokens if spec.per_token else supervised) * prod(spec.shape) * spec.dtype.itemsize
            for spec in self.tensor_specs
        )

    def describe_missing(self, needs: Needs) -> str | None:
        """Describe what a method needs and this schema lacks; return None if nothing is missing."""
        if needs.layers and needs.layers != self.layers:
            return f"captured layers {needs.layers}, got {self.layers or 'none'}"
        if needs.layers and needs.context and not self.context:
            return "captured layers of every token, got those of supervised tokens"
        if needs.hidden and not (self.hidden or self.teacher is TeacherKind.hidden):
            return "the final hidden state, got none"
        if needs.hidden and needs.context and not (self.context and (self.hidden or self.on_prompts)):
            return "the final hidden state of every token, got that of supervised tokens"
        return None


def build_schema(conf: CaptureConf, needs: Needs, *, hidden_size: int, vocab_size: int) -> FeatureSchema:
    """Build the schema of the store; raise UserError if the features cannot be stored."""
    require(needs.storable, f"draft: must leave its target as it is, got {conf.draft.method}; train it without a store")
    require(
        not needs.context or conf.data.overlap is None,
        f"data.overlap: must be null for {conf.draft.method}, which reads what the target "
        f"computed on all earlier tokens, got {conf.data.overlap}; raise data.row_length",
    )
    return FeatureSchema(
        layers=needs.layers,
        hidden=needs.hidden,
        context=needs.context,
        dtype=conf.dtype,
        teacher=conf.teacher,
        top_k=min(conf.top_k, vocab_size),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        on_prompts=conf.on_prompts,
    )


def quantize(rows: Float[Tensor, "*batch width"], dtype: Dtype) -> tuple[Tensor, Float[Tensor, "*batch"] | None]:
    """Return values [*batch, width] in the storage type, and the scale of each row.

    >>> quantize(torch.tensor([0.5, -0.25, 1.0]), Dtype.int8)[0].tolist()
    [64, -32, 127]
    >>> dequantize(*quantize(torch.zeros(3), Dtype.fp8)).tolist()
    [0.0, 0.0, 0.0]
    """
    if dtype.max_value is None:
        return rows.to(TORCH_DTYPES[dtype]), None
    rows = rows.float()
    scale = (rows.abs().amax(-1) / dtype.max_value).clamp_min(SMALLEST)
    scaled = rows / scale[..., None]
    return (scaled.round() if dtype is Dtype.int8 else scaled).to(TORCH_DTYPES[dtype]), scale


def dequantize(values: Tensor, scale: Float[Tensor, "*batch"] | None) -> Float[Tensor, "*batch width"]:
    """Undo `quantize` up to rounding; the result is fp32, or bf16 if there is no scale."""
    return values if scale is None else values.float() * scale[..., None]


def widen_fp8(values: Tensor) -> Tensor:
    """Convert fp8 to fp32 and return any other type unchanged.

    This is faster than PyTorch on the host, which converts fp8 value by value. The shifted bits are
    those of an fp32 number whose exponent is 120 too small.

    >>> codes = [code for code in range(-128, 127) if code != -1]  # 127 and -1 encode NaN
    >>> every = torch.tensor(codes, dtype=torch.int8).view(torch.float8_e4m3fn)
    >>> torch.equal(widen_fp8(every), every.float())
    True
    """
    if values.dtype is not torch.float8_e4m3fn:
        return values
    sign_and_rest = -0x7810_0000  # 0x87F00000 in two's complement: bit 31 and bits 20 to 26
    bits = values.view(torch.int8).int().bitwise_left_shift_(20).bitwise_and_(sign_and_rest)
    return bits.view(torch.float32).mul_(2.0**120)


def rounding_error(
    rows: Float[Tensor, "*batch width"], restored: Float[Tensor, "*batch width"]
) -> Float[Tensor, "*batch 2"]:
    """Return for each row the error |x - restored|^2 / |x|^2, and the share of values zeroed."""
    rows, restored = rows.float(), restored.float()
    relative = (rows - restored).square().sum(-1) / rows.square().sum(-1).clamp_min(SMALLEST)
    zeroed = ((restored == 0) & (rows != 0)).float().mean(-1)
    return torch.stack([relative, zeroed], -1)
