"""The positions that count in a draft's loss, and their weights; see docs/losses.md.

An answer token weighs 1; a position has the weight of the token that it drafts. Where a split document's later piece
repeats the end of the piece before as its context, those tokens weigh 0: they are trained in the piece before.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.batch import Batch
from models.losses.config import LossConf, Reduction


def position_weights(
    batch: Batch, *, steps: int, conf: LossConf
) -> tuple[Float[Tensor, "steps rows length"], Float[Tensor, ""]]:
    """Return the loss weight of each position at each step, and the divisor of the loss.

    For drafts that read features: from the feature of token t and from token t+1, position t drafts
    token t+2+i at step i. It counts only if tokens t+1 .. t+2+i are all answer tokens of its
    document (docs/eagle3.md). Tokens of the context weigh 0. The divisor is the sum of the
    weights at step 0.
    """
    document_ids = batch.document_ids
    is_answer, is_trained = _find_learned_tokens(batch, conf)
    is_counted, weights = shift_left(is_answer, 1), []
    for i in range(steps):
        # A document is contiguous: if its last drafted token is in it, so are those before.
        same_document = shift_left(document_ids, 2 + i, fill=-1) == document_ids
        is_counted = is_counted & shift_left(is_answer, 2 + i) & same_document
        weights.append((is_counted & shift_left(is_trained, 2 + i)).float() * conf.step_decay**i)
    return _apply_reduction(torch.stack(weights), document_ids, conf)


def token_weights(batch: Batch, *, conf: LossConf) -> tuple[Float[Tensor, "rows length"], Float[Tensor, ""]]:
    """Return the loss weight of each position, and their sum, which divides the loss.

    For drafts that are language models: position t predicts token t+1, and counts if that is an
    answer token of its document, the first included. Tokens of the context weigh 0.
    """
    _, is_trained = _find_learned_tokens(batch, conf)
    same_document = shift_left(batch.document_ids, 1, fill=-1) == batch.document_ids
    is_counted = shift_left(is_trained, 1) & same_document
    (weight,), total = _apply_reduction(is_counted.float()[None], batch.document_ids, conf)
    return weight, total


def _find_learned_tokens(
    batch: Batch, conf: LossConf
) -> tuple[Bool[Tensor, "rows length"], Bool[Tensor, "rows length"]]:
    """Return the tokens that count as an answer, and those of them that are no context."""
    # All padding has the document id -1, so it would pass for one document.
    is_answer = (batch.answer_mask | conf.on_prompts) & (batch.document_ids >= 0)
    return is_answer, is_answer if batch.context_mask is None else is_answer & ~batch.context_mask


def _apply_reduction(
    weight: Float[Tensor, "steps rows length"], document_ids: Int[Tensor, "rows length"], conf: LossConf
) -> tuple[Float[Tensor, "steps rows length"], Float[Tensor, ""]]:
    """Return the weights under `loss.reduction`, and their sum at step 0."""
    if conf.reduction is Reduction.sequence:
        # A document never spans rows, so each row is summed on its own. The total of a document
        # without counted tokens is 0, and the clamp keeps its weights 0.
        same_document = document_ids[:, :, None] == document_ids[:, None, :]
        document_weight = (same_document * weight[0][:, None, :]).sum(-1)
        weight = weight / document_weight.clamp_min(torch.finfo(torch.float32).tiny)
    return weight, weight[0].sum()


def shift_left(x: Tensor, by: int, fill: int = 0) -> Tensor:
    """Return x[:, t + by] at t, and `fill` past the end."""
    return torch.cat([x[:, by:], torch.full_like(x[:, :by], fill)], 1)


def shift_right(x: Tensor, by: int) -> Tensor:
    """Return x[:, t - by] at t, and 0 before the start."""
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, : max(x.shape[1] - by, 0)]], 1)
