"""Hidden states in a half or a quarter of their bytes: each row has a scale of its own.

A row is what one layer computed at one token.

    bf16   2 bytes a value              as a target in bfloat16 computed it
    int8   1 byte and 4 a row           scale * round(x / scale), scale = max|x| / 127
    fp8    1 byte and 4 a row           e4m3 of x / scale, scale = max|x| / 448

int8 has one step for the whole row. It is the finer of the two as long as the values of a row are
alike, but one value of 1e4 among ones makes all others 0: `rounding` counts those. fp8 keeps every
value to a sixteenth, down to 2**-15 of the largest. Scales are fp32: an early layer's rows may be
as small as 1e-3 (a scale of 8e-6, below fp16's normal numbers), an outlier's as large as 1e5.
"""

from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor


class Dtype(Enum):
    """How a store keeps hidden states."""

    bf16 = "bf16"
    int8 = "int8"
    fp8 = "fp8"

    @property
    def torch(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[self.value]

    @property
    def largest(self) -> float | None:
        """What the largest value of a row becomes; None: rows have no scale."""
        return {"bf16": None, "int8": 127.0, "fp8": 448.0}[self.value]


def quantise(
    rows: Float[Tensor, "*batch width"], dtype: Dtype
) -> tuple[Tensor, Float[Tensor, "*batch"] | None]:
    """Values [*batch, width] as stored, and the scale of each row.

    >>> quantise(torch.tensor([0.5, -0.25, 1.0]), Dtype.int8)[0].tolist()
    [64, -32, 127]
    >>> dequantise(*quantise(torch.zeros(3), Dtype.fp8)).tolist()
    [0.0, 0.0, 0.0]
    """
    if dtype.largest is None:
        return rows.to(dtype.torch), None
    rows = rows.float()
    smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a scale too
    scale = (rows.abs().amax(-1) / dtype.largest).clamp_min(smallest)
    scaled = rows / scale[..., None]
    return (scaled.round() if dtype is Dtype.int8 else scaled).to(dtype.torch), scale


def dequantise(
    values: Tensor, scale: Float[Tensor, "*batch"] | None
) -> Float[Tensor, "*batch width"]:
    """What `quantise` was given, but for rounding: in bf16 without a scale, else in fp32."""
    return values if scale is None else values.float() * scale[..., None]


def widened(values: Tensor) -> Tensor:
    """fp8 as fp32, any other as it is; on a host, where PyTorch converts fp8 value by value.

    The bits are those of an fp32 number whose exponent is 120 too small.

    >>> codes = [code for code in range(-128, 127) if code != -1]  # the two others are no numbers
    >>> every = torch.tensor(codes, dtype=torch.int8).view(torch.float8_e4m3fn)
    >>> torch.equal(widened(every), every.float())
    True
    """
    if values.dtype is not torch.float8_e4m3fn:
        return values
    sign_and_rest = -0x7810_0000  # 0x87F00000 in two's complement
    bits = values.view(torch.int8).int().bitwise_left_shift_(20).bitwise_and_(sign_and_rest)
    return bits.view(torch.float32).mul_(2.0**120)


def rounding(
    rows: Float[Tensor, "*batch width"], kept: Float[Tensor, "*batch width"]
) -> Float[Tensor, "*batch 2"]:
    """Of each row: |x - kept|^2 / |x|^2, and the share of its values that became 0."""
    rows, kept = rows.float(), kept.float()
    smallest = torch.finfo(torch.float32).tiny
    squared = (rows - kept).square().sum(-1) / rows.square().sum(-1).clamp_min(smallest)
    lost = ((kept == 0) & (rows != 0)).float().mean(-1)
    return torch.stack([squared, lost], -1)
