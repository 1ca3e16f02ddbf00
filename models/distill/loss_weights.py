"""Which rows a draft learns from, and how much each weighs.

A token of an answer weighs 1 or, with `loss.half_life`, half as much every so many tokens into its
answer: what is drafted early decides more of what follows. A row weighs what the token weighs that
it drafts. A token in the context of a split document's later piece weighs nothing: it is learned
with the piece before, whose end it is.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.distill.losses import LossConf, Reduction


def row_weights(
    answer: Bool[Tensor, "rows length"], document: Int[Tensor, "rows length"], *, steps: int,
    conf: LossConf, context: Bool[Tensor, "rows length"] | None = None,
) -> tuple[Float[Tensor, "steps rows length"], Float[Tensor, ""]]:  # fmt: skip
    """Of a draft that reads the target's features: weight of row t at each step, and the sum.

    Row t drafts token t+2+i at step i. It counts when tokens t+1 .. t+2+i are all answer tokens of
    its own document: the rollouts that decoding performs (it drafts behind an answer token), and no
    others. The sum, which divides the loss, is that of step 0.
    """
    own = answer & (document >= 0)
    worth, counts = _worth(own, document, context, conf), sooner(own, 1)
    weights = []
    for i in range(steps):
        same = sooner(document, 2 + i, fill=-1) == document
        counts = counts & sooner(own, 2 + i) & same
        weights.append(counts * sooner(worth, 2 + i) * conf.step_decay**i)
    return _reduced(torch.stack(weights), document, conf)


def token_weights(
    answer: Bool[Tensor, "rows length"], document: Int[Tensor, "rows length"], *, conf: LossConf,
    context: Bool[Tensor, "rows length"] | None = None,
) -> tuple[Float[Tensor, "rows length"], Float[Tensor, ""]]:  # fmt: skip
    """Of a draft that is a language model: weight of row t, which predicts token t+1, and the sum.

    Row t counts when token t+1 is an answer token of its own document. Decoding never drafts an
    answer's first token (the target's prefill gives it), but it is learned all the same: its row
    shares every weight with the others, and answers of one token would teach nothing without it.
    """
    own = answer & (document >= 0)
    counts = sooner(own, 1) & (sooner(document, 1, fill=-1) == document)
    weight = counts * sooner(_worth(own, document, context, conf), 1)
    (weight,), total = _reduced(weight[None], document, conf)
    return weight, total


def _worth(
    own: Bool[Tensor, "rows length"], document: Int[Tensor, "rows length"],
    context: Bool[Tensor, "rows length"] | None, conf: LossConf,
) -> Float[Tensor, "rows length"]:  # fmt: skip
    """What an answer token weighs by its place in its answer; of others it means nothing."""
    learned = torch.ones_like(own) if context is None else ~context
    if conf.half_life is None:
        return learned.float()
    starts = own & ~(later(own, 1) & (later(document, 1) == document))
    place = torch.arange(own.shape[1], device=own.device)
    age = place - _sum_by(starts.cumsum(1), (starts * place).float())
    return learned * 0.5 ** (age / conf.half_life)


def _reduced(
    weight: Float[Tensor, "steps rows length"], document: Int[Tensor, "rows length"],
    conf: LossConf,
) -> tuple[Float[Tensor, "steps rows length"], Float[Tensor, ""]]:  # fmt: skip
    if conf.reduction is Reduction.sequence:
        # a document never spans rows, so its share is counted within one
        whole = _sum_by(document, weight[0])
        weight = weight / whole.clamp_min(torch.finfo(torch.float32).tiny)
    return weight, weight[0].sum()


def _sum_by(
    group: Int[Tensor, "rows length"], x: Float[Tensor, "rows length"]
) -> Float[Tensor, "rows length"]:
    """At each place, the sum of x over the places of its row that are of the same group."""
    same = group[:, :, None] == group[:, None, :]
    return (same * x[:, None, :]).sum(-1)


def sooner(x: Tensor, by: int, fill: int = 0) -> Tensor:
    """x[:, t + by] at t; what lies beyond the end is `fill`."""
    return torch.cat([x[:, by:], torch.full_like(x[:, :by], fill)], 1)


def later(x: Tensor, by: int) -> Tensor:
    """x[:, t - by] at t; what lies before the start is 0."""
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]], 1)
