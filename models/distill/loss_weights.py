"""The rows that count in a draft's loss, and their weights.

An answer token weighs 1. With `loss.half_life` the weight halves every so many tokens into the
answer, because early draft tokens decide more of what follows. A row has the weight of the token
that it drafts. A token in the context of a split document's later piece weighs 0: it is trained
with the piece before, where it is at the end.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.distill.config import LossConf, Reduction


def row_weights(
    answer_mask: Bool[Tensor, "rows length"], document_ids: Int[Tensor, "rows length"], *,
    steps: int, conf: LossConf, context_mask: Bool[Tensor, "rows length"] | None = None,
) -> tuple[Float[Tensor, "steps rows length"], Float[Tensor, ""]]:  # fmt: skip
    """Return the weight of row t at each step, and their sum, for drafts that read features.

    Row t drafts token t+2+i at step i. It counts if tokens t+1 .. t+2+i are all answer tokens of
    its document: these are exactly the rollouts of decoding, which drafts behind an answer token.
    The sum, which divides the loss, is that of step 0.
    """
    is_answer = answer_mask & (document_ids >= 0)
    position_weight = _position_weight(is_answer, document_ids, context_mask, conf)
    is_counted, weights = shift_left(is_answer, 1), []
    for i in range(steps):
        same_document = shift_left(document_ids, 2 + i, fill=-1) == document_ids
        is_counted = is_counted & shift_left(is_answer, 2 + i) & same_document
        weights.append(is_counted * shift_left(position_weight, 2 + i) * conf.step_decay**i)
    return _apply_reduction(torch.stack(weights), document_ids, conf)


def token_weights(
    answer_mask: Bool[Tensor, "rows length"], document_ids: Int[Tensor, "rows length"], *,
    conf: LossConf, context_mask: Bool[Tensor, "rows length"] | None = None,
) -> tuple[Float[Tensor, "rows length"], Float[Tensor, ""]]:  # fmt: skip
    """Return the weight of row t and the sum over rows, for drafts that are language models.

    Row t predicts token t+1; it counts if that is an answer token of its document. Decoding never
    drafts an answer's first token (the target's prefill returns it), but it is trained too: its row
    uses the same parameters as the others, and answers of one token would otherwise count nowhere.
    """
    is_answer = answer_mask & (document_ids >= 0)
    is_counted = shift_left(is_answer, 1) & (shift_left(document_ids, 1, fill=-1) == document_ids)
    weight = is_counted * shift_left(
        _position_weight(is_answer, document_ids, context_mask, conf), 1
    )
    (weight,), total = _apply_reduction(weight[None], document_ids, conf)
    return weight, total


def _position_weight(
    is_answer: Bool[Tensor, "rows length"], document_ids: Int[Tensor, "rows length"],
    context_mask: Bool[Tensor, "rows length"] | None, conf: LossConf,
) -> Float[Tensor, "rows length"]:  # fmt: skip
    """Return each answer token's weight by its position in the answer; ignore other entries."""
    is_trained = torch.ones_like(is_answer) if context_mask is None else ~context_mask
    if conf.half_life is None:
        return is_trained.float()
    starts = is_answer & ~(
        shift_right(is_answer, 1) & (shift_right(document_ids, 1) == document_ids)
    )
    position = torch.arange(is_answer.shape[1], device=is_answer.device)
    age = position - _sum_by_group(starts.cumsum(1), (starts * position).float())
    return is_trained * 0.5 ** (age / conf.half_life)


def _apply_reduction(
    weight: Float[Tensor, "steps rows length"], document_ids: Int[Tensor, "rows length"],
    conf: LossConf,
) -> tuple[Float[Tensor, "steps rows length"], Float[Tensor, ""]]:  # fmt: skip
    if conf.reduction is Reduction.sequence:
        # A document never spans rows, so its total is a sum within its row.
        document_weight = _sum_by_group(document_ids, weight[0])
        weight = weight / document_weight.clamp_min(torch.finfo(torch.float32).tiny)
    return weight, weight[0].sum()


def _sum_by_group(
    group: Int[Tensor, "rows length"], x: Float[Tensor, "rows length"]
) -> Float[Tensor, "rows length"]:
    """Return at each position the sum of x over the positions of its row in the same group."""
    return ((group[:, :, None] == group[:, None, :]) * x[:, None, :]).sum(-1)


def shift_left(x: Tensor, by: int, fill: int = 0) -> Tensor:
    """Return x[:, t + by] at t, and `fill` beyond the end."""
    return torch.cat([x[:, by:], torch.full_like(x[:, :by], fill)], 1)


def shift_right(x: Tensor, by: int) -> Tensor:
    """Return x[:, t - by] at t, and 0 before the start."""
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]], 1)
