"""Muon equals PyTorch's in bf16; on a CPU it is as precise as the weights."""

import math

import pytest
import torch
from torch import nn

from models.device.config import Precision
from models.device.opening import matmul_dtype
from train.config.optim import MuonScaling, OptimConf, OptimName
from train.muon import Muon, orthogonalize
from train.optim import build_optimizers

SHAPES = {"tall": (24, 8), "square": (16, 16), "wide": (8, 40)}
COEFFICIENTS = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]).defaults["ns_coefficients"]


def draw_weights(seed: int) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES.values()]


def take_steps(optimizer: torch.optim.Optimizer, *, first: int, last: int) -> None:
    """Take steps whose gradients are drawn by the number of the step."""
    for step in range(first, last):
        for group in optimizer.param_groups:
            for index, weight in enumerate(group["params"]):
                draw = torch.Generator().manual_seed(100 * step + index)
                weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()


@pytest.mark.parametrize("scaling", MuonScaling)
def test_in_bf16_every_weight_is_that_of_pytorch_bit_for_bit(scaling):
    ours, theirs = draw_weights(0), draw_weights(0)
    settings = {"lr": 0.1, "weight_decay": 0.3}
    take_steps(Muon(ours, **settings, dtype=torch.bfloat16, scaling=scaling), first=0, last=4)
    take_steps(torch.optim.Muon(theirs, **settings, adjust_lr_fn=scaling.value), first=0, last=4)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_fp32_a_matrix_is_orthogonalized_as_in_float64(shape):
    """Singular values follow the polynomial, and rounding errors stay below the bound derived here.

    With unit roundoff u, a step's three products of up to n terms each add an error of about
    sqrt(n) * u to values near 1. Later steps magnify an error by the polynomial's slope, which is
    at most a = 3.44, at 0: five steps add 3 * sqrt(n) * u * (a**5 - 1) / (a - 1) at most.
    """
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = COEFFICIENTS
    values = values / values.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = left @ values.diag() @ right
    off = {}
    for dtype in (torch.float32, torch.bfloat16):
        result = orthogonalize(matrix.to(dtype), COEFFICIENTS, steps=5, eps=1e-7)
        off[dtype] = torch.linalg.matrix_norm(result.double() - expected, ord=2).item()
    n, u = max(shape), torch.finfo(torch.float32).eps / 2
    bound = 3 * math.sqrt(n) * u * (a**5 - 1) / (a - 1)
    assert off[torch.float32] < bound < off[torch.bfloat16]


def test_products_are_fp32_on_a_cpu_and_bf16_elsewhere_unless_a_key_says_otherwise():
    assert matmul_dtype(Precision.auto, torch.device("cpu")) == torch.float32
    assert matmul_dtype(Precision.auto, torch.device("cuda")) == torch.bfloat16
    assert matmul_dtype(Precision.float32, torch.device("cuda")) == torch.float32
    for precision, dtype in [(Precision.auto, torch.float32), (Precision.bfloat16, torch.bfloat16)]:
        conf = OptimConf(name=OptimName.muon, muon_precision=precision)
        (muon,), _ = build_optimizers(conf, nn.Linear(8, 8, bias=False))
        assert isinstance(muon, Muon)
        assert muon.dtype == dtype
