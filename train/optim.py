"""Optimizers and learning rate schedules.

Muon (https://kellerjordan.github.io/posts/muon/) trains the matrices between embedding and head,
AdamW the rest. Parameters and moments are fp32 whatever the forward pass runs in.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from models.device.opening import matmul_dtype
from train.config.optim import DEFAULT_STEPS, OptimConf, OptimName
from train.muon import Muon


def build_optimizers(
    conf: OptimConf, draft: nn.Module, adamw: Callable[..., AdamW] = AdamW, *, steps: int | None = None
) -> tuple[list[Optimizer], list[LambdaLR]]:
    """Return optimizers and a schedule for each; `steps` are needed if they depend on the number of rows."""
    total = steps or conf.steps or DEFAULT_STEPS
    matrices, decayed, plain = split_parameters(draft)
    if conf.name is OptimName.adamw:
        matrices, decayed = [], decayed + matrices
    groups = _group_by_lr_scale(decayed, conf.lr, weight_decay=conf.weight_decay)
    groups += _group_by_lr_scale(plain, conf.lr, weight_decay=0.0)
    optimizers: list[Optimizer] = []
    if groups:
        optimizers.append(adamw(groups, lr=conf.lr, betas=(conf.betas[0], conf.betas[1])))
    if matrices:
        lr = 10 * conf.lr if conf.muon_lr is None else conf.muon_lr
        groups, dtype = _group_by_lr_scale(matrices, lr), matmul_dtype(conf.muon_precision, matrices[0].device)
        optimizers.append(Muon(groups, lr=lr, weight_decay=conf.weight_decay, dtype=dtype, scaling=conf.muon_scaling))

    def factor(step: int) -> float:  # a bound method would be pickled into the saved state
        return conf.rate_factor(step, total)

    return optimizers, [LambdaLR(optimizer, factor) for optimizer in optimizers]


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def allocate_optimizer_states(optimizers: list[Optimizer]) -> None:
    """Set optimizer states to what the first step would allocate, which then needs no graph of its own."""
    for optimizer in optimizers:
        is_adamw = isinstance(optimizer, AdamW)
        averages = ("exp_avg", "exp_avg_sq") if is_adamw else ("momentum_buffer",)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                step_device = parameter.device if group.get("fused") else None
                optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in averages} | (
                    {"step": torch.zeros((), device=step_device)} if is_adamw else {}
                )


def _group_by_lr_scale(params: list[nn.Parameter], lr: float, **options: float) -> list[dict[str, Any]]:
    """Return a parameter group per `lr_scale`, an attribute that methods set on parameters."""
    scales = sorted({getattr(p, "lr_scale", 1.0) for p in params})
    return [
        {"params": [p for p in params if getattr(p, "lr_scale", 1.0) == scale], "lr": lr * scale} | options
        for scale in scales
    ]


def split_parameters(draft: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Split trained parameters into (hidden matrices, other decayed weights, undecayed weights).

    A head does not count as a hidden matrix: as in an embedding, each of its rows belongs to a
    token, and Muon would mix the tokens.
    """
    embeddings = {id(module.weight) for module in draft.modules() if isinstance(module, nn.Embedding)}
    trained = [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
    plain = [p for _, p in trained if p.ndim < 2 or id(p) in embeddings]
    decayed = [(name, p) for name, p in trained if p.ndim >= 2 and id(p) not in embeddings]
    matrices = [p for name, p in decayed if p.ndim == 2 and "lm_head" not in name]
    others = [p for name, p in decayed if p.ndim > 2 or "lm_head" in name]
    return matrices, others, plain
