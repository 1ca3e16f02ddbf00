"""PyTorch's Muon (https://kellerjordan.github.io/posts/muon/) with a choice of precision.

torch.optim.Muon orthogonalizes in bf16 on every device. A CPU without matrix units for bf16 spends
most of a training step there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from train.config.optim import MuonScaling


class Muon(torch.optim.Muon):
    """torch.optim.Muon with its defaults, state and updates; only `dtype` is added."""

    def __init__(self, params: Any, *, lr: float, weight_decay: float, dtype: torch.dtype, scaling: MuonScaling):
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn=scaling.value)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every weight that has a gradient; return the closure's loss, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in (p for p in group["params"] if p.grad is not None):
                self._update_weight(weight, weight.grad, group)
        return loss

    def _update_weight(
        self, weight: Float[Tensor, "rows columns"], gradient: Float[Tensor, "rows columns"], group: dict[str, Any]
    ) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(average, group["momentum"])
        update = orthogonalize(
            nesterov.to(self.dtype), group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"]
        )
        rows, columns = weight.shape
        scale = (
            0.2 * math.sqrt(max(rows, columns))
            if group["adjust_lr_fn"] == MuonScaling.match_rms_adamw.value
            else math.sqrt(max(1, rows / columns))
        )
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * scale)


def orthogonalize(
    matrix: Float[Tensor, "rows columns"], coefficients: tuple[float, float, float], *, steps: int, eps: float
) -> Float[Tensor, "rows columns"]:
    """Return `matrix` with all singular values brought near 1, in its dtype.

    Each step of this quintic Newton-Schulz iteration maps a singular value x to a*x + b*x**3 + c*x**5. The coefficients
    trade the last digits for steps: values end between 0.7 and 1.2, which serves as well as 1.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    flat = matrix.T if tall else matrix  # so that `square` is as small as possible
    flat = flat / flat.norm().clamp(min=eps)  # bounds the singular values by 1
    for _ in range(steps):
        square = flat @ flat.T
        flat = torch.addmm(flat, torch.addmm(square, square, square, beta=b, alpha=c), flat, beta=a)
    return flat.T if tall else flat
