"""Which rows a feature draft learns from, and how much each weighs."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.losses import LossConf, Reduction


def row_weights(
    answer: Bool[Tensor, "rows length"], document: Int[Tensor, "rows length"], *, steps: int,
    conf: LossConf,
) -> tuple[Float[Tensor, "steps rows length"], Float[Tensor, ""]]:  # fmt: skip
    """Weight of row t at each step, and their denominator.

    Row t counts at step i when tokens t+1 .. t+2+i are all answer tokens of its own document: the
    rollouts that decoding performs (it drafts behind an answer token), and no others.
    """
    own = answer & (document >= 0)
    counts = sooner(own, 1)
    masks = []
    for i in range(steps):
        same = sooner(document, 2 + i, fill=-1) == document
        counts = counts & sooner(own, 2 + i) & same
        masks.append(counts)
    mask = torch.stack(masks).float()
    decay = conf.step_decay ** torch.arange(steps, device=mask.device)
    if conf.reduction is Reduction.token:
        return mask * decay[:, None, None], mask[0].sum()
    # a document never spans rows, so its share is counted within one
    same = document[:, :, None] == document[:, None, :]
    supervised = (same * mask[0][:, None, :]).sum(-1).clamp_min(1)  # rows of one's own document
    share = mask / supervised
    return share * decay[:, None, None], share[0].sum()


def sooner(x: Tensor, by: int, fill: int = 0) -> Tensor:
    """x[:, t + by] at t; what lies beyond the end is `fill`."""
    return torch.cat([x[:, by:], torch.full_like(x[:, :by], fill)], 1)


def later(x: Tensor, by: int) -> Tensor:
    """x[:, t - by] at t; what lies before the start is 0."""
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]], 1)
