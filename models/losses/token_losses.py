"""The losses: the distance of a draft from its target, token by token.

A loss is a function of both distributions that returns a value for each token; its name is that of
its `LossName`. Its gradient is autograd's, unless `GRADIENTS` has a function that needs fewer
passes over the vocabulary: slope - draft * sum(slope), with slope_v = draft_v * d loss / d draft_v
(docs/losses.md).

A token whose supervised token (the target's likeliest, for `ce` that of the text) is outside the draft's vocabulary is
not `covered`: its loss is 0 (as in EAGLE-3), its weight stays in the denominator, and the metrics count it as a miss.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from models.losses.config import LossConf, LossName
from models.losses.distributions import LOG_ZERO, TINY, DraftDistribution, TargetDistribution, draft_distribution
from models.operators import topk_rows

# --- values ---------------------------------------------------------------------------------------


def soft_ce(draft: DraftDistribution, target: TargetDistribution, _conf: LossConf) -> Tensor:
    """Return the cross entropy with the target's distribution."""
    return -(target.soft * draft.log_probs).sum(-1)


def forward_kl(draft: DraftDistribution, target: TargetDistribution, _conf: LossConf) -> Tensor:
    """Return KL(target || draft)."""
    # The negative entropy is one for all steps, so this has a pass less than one difference.
    return (target.soft * target.log_soft).sum(-1) - (target.soft * draft.log_probs).sum(-1)


def reverse_kl(draft: DraftDistribution, target: TargetDistribution, _conf: LossConf) -> Tensor:
    """Return KL(draft || target)."""
    return (draft.probs * (draft.log_probs - target.log_soft)).sum(-1)


def jsd(draft: DraftDistribution, target: TargetDistribution, conf: LossConf) -> Tensor:
    """Return the generalized Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649).

    At a beta of exactly 0 and 1 it is the forward and the reverse KL, undivided, as in TRL.
    """
    beta = conf.beta
    if beta in (0, 1):
        return (reverse_kl if beta else forward_kl)(draft, target, conf)
    log_mixed = torch.lerp(draft.probs, target.soft, beta).clamp_min(TINY).log()
    to_target = (target.soft * (target.log_soft - log_mixed)).sum(-1)
    to_draft = (draft.probs * (draft.log_probs - log_mixed)).sum(-1)
    return beta * to_target + (1 - beta) * to_draft


def tv(draft: DraftDistribution, _target: TargetDistribution, _conf: LossConf) -> Tensor:
    """Return 1 - alpha: the total variation distance, which is the rejection probability."""
    return 1 - draft.alpha


def ce(draft: DraftDistribution, _target: TargetDistribution, _conf: LossConf) -> Tensor:
    """Return the cross entropy with the text's token."""
    assert draft.label_log_prob is not None, "loss.name=ce: needs labels"
    return -draft.label_log_prob


def lk_hybrid(draft: DraftDistribution, target: TargetDistribution, conf: LossConf) -> Tensor:
    """Return the LK hybrid loss (https://arxiv.org/abs/2602.23881): a KL that turns into `tv`.

    The gradient treats the weight of the KL as a constant.
    """
    kl_weight = torch.exp(-conf.lk_eta * draft.alpha.detach())
    return kl_weight * forward_kl(draft, target, conf) + (1 - kl_weight) * (1 - draft.alpha)


def topk_kl(draft: DraftDistribution, target: TargetDistribution, conf: LossConf) -> Tensor:
    """Return the forward KL over the target's k likeliest tokens and one bucket of all others."""
    # Columns without the bucket of a coarse target.
    num_tokens = (target.soft if target.column_ids is None else target.column_ids).shape[-1]
    top_probs, ids = topk_rows(target.soft[..., :num_tokens], min(conf.top_k, num_tokens))
    target_rest = target.soft.scatter(-1, ids, 0.0).sum(-1)
    ids = ids.expand(*draft.alpha.shape, -1)
    # A sharp draft's probability of the bucket would underflow, so only its logarithm is used.
    log_rest = draft.log_probs.scatter(-1, ids, LOG_ZERO).logsumexp(-1)
    entropy = torch.special.entr(top_probs).sum(-1) + torch.special.entr(target_rest)
    cross = (top_probs * draft.log_probs.gather(-1, ids)).sum(-1) + target_rest * log_rest
    return -entropy - cross


# A loss is the function of its name: a new one is a function and a value of LossName. KeyError: a value without one.
LOSSES: dict[LossName, Callable[..., Tensor]] = {name: globals()[name.value] for name in LossName}

# --- gradients of scale * value, for the draft's logits -------------------------------------------

Scale = Float[Tensor, "*steps tokens"]


def forward_kl_grad(draft: DraftDistribution, target: TargetDistribution, _conf: LossConf, scale: Scale) -> Tensor:
    """Return the gradient of `forward_kl` and of `soft_ce`, which differ by a constant."""
    grad = (draft.probs * scale[..., None]).addcmul_(target.soft, -scale[..., None])
    return draft.expand_grad(grad, target)


def ce_grad(draft: DraftDistribution, target: TargetDistribution, _conf: LossConf, scale: Scale) -> Tensor:
    """Return the gradient of `ce`."""
    assert target.label is not None
    grad = draft.expand_grad(draft.probs * scale[..., None], target)
    label = target.label.expand(scale.shape)[..., None]
    return grad.scatter_add_(-1, label, -scale[..., None])


def lk_hybrid_grad(draft: DraftDistribution, target: TargetDistribution, conf: LossConf, scale: Scale) -> Tensor:
    """Return the gradient of `lk_hybrid`; alpha rises with probabilities below the target's."""
    kl_weight = torch.exp(-conf.lk_eta * draft.alpha)
    below = torch.where(draft.probs < target.probs, draft.probs, 0.0)
    slope_sum = -kl_weight - (1 - kl_weight) * below.sum(-1)
    grad = draft.probs * (-scale * slope_sum)[..., None]
    grad.addcmul_(target.soft, (scale * -kl_weight)[..., None])
    grad.addcmul_(below, (scale * (kl_weight - 1))[..., None])
    return draft.expand_grad(grad, target)


GRADIENTS: dict[LossName, Callable[..., Tensor]] = {
    LossName.soft_ce: forward_kl_grad,
    LossName.forward_kl: forward_kl_grad,
    LossName.ce: ce_grad,
    LossName.lk_hybrid: lk_hybrid_grad,
}

# --- what training needs of a loss ----------------------------------------------------------------


def score_tokens(
    draft: DraftDistribution, target: TargetDistribution, kept_ids: Tensor | None, conf: LossConf
) -> dict[str, Tensor]:
    """Return `loss`, `alpha`, `hit` and `covered` of each drafted token.

    alpha is 1 - the total variation distance; a hit has the target's likeliest token.
    """
    value = LOSSES[conf.name](draft, target, conf)
    top_token = draft.top_token if kept_ids is None else kept_ids[draft.top_token]
    covered = target.covered.expand(top_token.shape)
    return {"loss": value * covered, "alpha": draft.alpha, "hit": top_token == target.top_token, "covered": covered}


def score_with_grad(
    logits: Float[Tensor, "*steps tokens draft_vocab"],
    target: TargetDistribution,
    kept_ids: Tensor | None,
    conf: LossConf,
    weight: Float[Tensor, "*steps tokens"],
) -> tuple[dict[str, Tensor], Float[Tensor, "*steps tokens draft_vocab"]]:
    """Return the scores of the draft's logits, and the gradient of their weighted loss."""

    def score(logits: Tensor) -> tuple[DraftDistribution, dict[str, Tensor]]:
        draft = draft_distribution(logits, target, temperature=conf.temperature)
        return draft, score_tokens(draft, target, kept_ids, conf)

    if conf.name in GRADIENTS:
        draft, scores = score(logits)
        scale = weight * scores["covered"] / conf.temperature
        return scores, GRADIENTS[conf.name](draft, target, conf, scale)

    def total(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        _, scores = score(logits)
        return (scores["loss"] * weight).sum(), scores

    grad, scores = torch.func.grad(total, has_aux=True)(logits.float())
    return scores, grad
