"""The losses: the value of each for one token's logits, and its slope over the vocabulary.

With draft = softmax(logits), a loss of that distribution has the gradient

    d loss / d logits = slope - draft * sum(slope),    slope_v = draft_v * (d loss / d draft_v)

so value and slope define a loss, in a few lines each. Terms of the slope that are proportional to
the draft cancel and are left out. All computations are in fp32.

`soft` is the target's distribution renormalized over the draft's vocabulary. `probs` is not
renormalized: it yields the true acceptance probability, and sums to less than 1 if the draft's
vocabulary lacks tokens.

With only the target's k likeliest tokens (`TopKLogits`) both distributions are made coarse: a
column for each of the k, and a last one, the bucket, for all other tokens together. The logit of
the bucket is the logsumexp of the other tokens' logits, so columns can be used like logits, every
loss is the exact divergence of the coarse distributions, and its gradient is spread from the bucket
over the other tokens in proportion to the draft. docs/losses.md explains what a bucket hides.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from models.distill.config import LossConf
from models.distill.topk_logits import TopKLogits

# Stands for log(0), but stays finite when multiplied by weights or by 0; and not every compiler
# computes with -inf.
LOG_ZERO = -1e30
TINY = torch.finfo(torch.float32).tiny


@dataclass(kw_only=True)
class TargetDistribution:
    """The target's distribution over a draft vocabulary: one column per token, or coarse."""

    probs: Float[Tensor, "tokens columns"]  # sums to less than 1 if the vocabulary is reduced
    soft: Float[Tensor, "tokens columns"]  # renormalized over the draft's vocabulary
    log_soft: Float[Tensor, "tokens columns"]
    # The likeliest token of the target's vocabulary, a target id.
    top_token: Int[Tensor, " num_token_columns"]
    # The text's token, a draft id; 0 if not covered.
    label: Int[Tensor, " num_token_columns"] | None
    # Whether the draft's vocabulary has the token that the loss supervises.
    covered: Bool[Tensor, " num_token_columns"]
    # If coarse, the draft ids of the columns; draft_vocab for a token that the draft lacks.
    column_ids: Int[Tensor, "tokens k"] | None = None

    @property
    def num_token_columns(self) -> int:
        """Return the number of columns that stand for a single token: all but the bucket."""
        return (self.soft if self.column_ids is None else self.column_ids).shape[-1]


def target_distribution(
    logits: Float[Tensor, "tokens vocab"], *, labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None, temperature: float,
) -> TargetDistribution:  # fmt: skip
    """Return the target's distribution over the draft's vocabulary.

    With `labels` (target ids), `covered` tells whether the draft has the label of each token
    instead of the target's likeliest token.
    """
    logits = logits.float()
    top_token = logits.max(
        -1
    ).indices  # the first of equals, like argmax, which takes twice as long
    if temperature != 1:
        logits = logits / temperature
    if kept_ids is None:
        log_probs = logits.log_softmax(-1)
        probs = log_probs.exp()
        return TargetDistribution(
            probs=probs, soft=probs, log_soft=log_probs, top_token=top_token, label=labels,
            covered=torch.ones_like(top_token).bool(),
        )  # fmt: skip
    supervised_id = _draft_id_lookup(kept_ids, logits.shape[-1])[
        top_token if labels is None else labels
    ]
    kept_logits = logits.index_select(-1, kept_ids)
    log_soft = kept_logits.log_softmax(-1)
    return TargetDistribution(
        probs=(kept_logits - logits.logsumexp(-1, keepdim=True)).exp(),
        soft=log_soft.exp(),
        log_soft=log_soft,
        top_token=top_token,
        label=None if labels is None else supervised_id.clamp_min(0),
        covered=supervised_id >= 0,
    )


def _draft_id_lookup(kept_ids: Int[Tensor, " draft_vocab"], vocab: int) -> Int[Tensor, " vocab"]:
    """Return the draft id of each target id, or -1 if it has none."""
    draft_ids = torch.arange(len(kept_ids), device=kept_ids.device)
    return kept_ids.new_full((vocab,), -1).scatter(0, kept_ids, draft_ids)


def target_distribution_from_topk(
    top: TopKLogits, *, labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
) -> TargetDistribution:  # fmt: skip
    """Return the target's coarse distribution over the draft's vocabulary.

    A reduced vocabulary is assumed to hold all tokens of the bucket.
    """
    ids = top.ids.long()
    kept_ids = torch.arange(top.vocab_size, device=ids.device) if kept_ids is None else kept_ids
    draft_ids = _draft_id_lookup(kept_ids, top.vocab_size)
    columns, supervised_id = draft_ids[ids], draft_ids[ids[:, 0] if labels is None else labels]
    top_probs = torch.where(columns >= 0, top.log_probs.float().exp(), 0.0)
    probs = torch.cat([top_probs, top.rest.float()[:, None]], -1)
    soft = probs / probs.sum(-1, keepdim=True).clamp_min(TINY)
    return TargetDistribution(
        probs=probs, soft=soft, log_soft=soft.clamp_min(TINY).log(), top_token=ids[:, 0],
        label=None if labels is None else supervised_id.clamp_min(0), covered=supervised_id >= 0,
        column_ids=torch.where(columns < 0, len(kept_ids), columns),
    )  # fmt: skip


@dataclass(kw_only=True)
class DraftDistribution:
    """The draft's distribution, in the columns of the target distribution that all steps share."""

    log_probs: Float[Tensor, "*steps tokens columns"]
    probs: Float[Tensor, "*steps tokens columns"]
    alpha: Float[Tensor, "*steps tokens"]  # probability that a sampled draft token is accepted
    top_token: Int[Tensor, "*steps tokens"]  # likeliest token, a draft id
    label_log_prob: Float[Tensor, "*steps tokens"] | None
    # If coarse, the logits of the bucket's tokens and LOG_ZERO for the others.
    bucket_logits: Float[Tensor, "*steps tokens _"] | None
    target_dist: TargetDistribution

    def probs_below_target(self) -> Float[Tensor, "*steps tokens columns"]:
        """Return the draft's probabilities where they are below the target's, and 0 elsewhere.

        alpha rises with these probabilities only.
        """
        return torch.where(self.probs < self.target_dist.probs, self.probs, 0.0)

    def expand_grad(
        self, grad: Float[Tensor, "*steps tokens columns"]
    ) -> Float[Tensor, "*steps tokens draft_vocab"]:
        """Return the gradient with respect to the draft's logits, given that of its columns."""
        if self.bucket_logits is None or self.target_dist.column_ids is None:
            return grad
        columns = self.target_dist.column_ids.expand(*grad.shape[:-1], -1)
        share = (self.bucket_logits - _bucket_logit(self.bucket_logits)).exp()
        # The last column of the result belongs to tokens that the draft lacks.
        return (share * grad[..., -1:]).scatter_(-1, columns, grad[..., :-1])[..., :-1]


def _bucket_logit(bucket_logits: Tensor) -> Tensor:
    """Return the logit of the bucket, or `LOG_ZERO` if it is empty."""
    return bucket_logits.logsumexp(-1, keepdim=True)


def draft_distribution(
    logits: Float[Tensor, "*steps tokens draft_vocab"],
    target_dist: TargetDistribution,
    *,
    temperature: float,
) -> DraftDistribution:
    """Return the draft's distribution in the columns of the target's, given the draft's logits."""
    logits = logits.float()
    top_token = logits.max(-1).indices
    if temperature != 1:
        logits = logits / temperature
    bucket_logits, column_logits = None, logits
    if target_dist.column_ids is not None:
        columns = target_dist.column_ids.expand(*logits.shape[:-1], -1)
        bucket_logits = pad(logits, (0, 1), value=LOG_ZERO)  # for tokens that the draft lacks
        top_logits, bucket_logits = (
            bucket_logits.gather(-1, columns),
            bucket_logits.scatter(-1, columns, LOG_ZERO),
        )
        column_logits = torch.cat([top_logits, _bucket_logit(bucket_logits)], -1)
    log_probs = column_logits.log_softmax(-1)
    probs = log_probs.exp()
    # At a tie, the gradient of `where` matches `probs_below_target`; that of `minimum`, which is
    # one pass less, does not.
    smaller = (
        torch.where(probs < target_dist.probs, probs, target_dist.probs)
        if torch.is_grad_enabled()
        else torch.minimum(probs, target_dist.probs)
    )
    label_log_prob = None
    if target_dist.label is not None:
        label = target_dist.label.expand(top_token.shape)[..., None]
        label_log_prob = logits.gather(-1, label)[..., 0] - column_logits.logsumexp(-1)
    return DraftDistribution(
        log_probs=log_probs,
        probs=probs,
        alpha=smaller.sum(-1),
        top_token=top_token,
        label_log_prob=label_log_prob,
        bucket_logits=bucket_logits,
        target_dist=target_dist,
    )


@dataclass(kw_only=True)
class LossTerm:
    """The loss of each token, and its slope as a sum of terms: factor of the token * term.

    Every operation over the vocabulary is a pass over memory. Separate factors can be multiplied by
    the token's weight before they are applied to the vocabulary.
    """

    value: Float[Tensor, "*steps tokens"]
    # ([*steps, tokens] or a number, [..., draft_vocab])
    slope_terms: list[tuple[Tensor | float, Tensor]]
    slope_sum: Float[Tensor, "*steps tokens"] | float  # over the vocabulary, `label` included
    label: Int[Tensor, "*steps tokens"] | None = None  # the slope of this token has an extra -1

    def gradient(
        self, draft: DraftDistribution, scale: Float[Tensor, "*steps tokens"]
    ) -> Float[Tensor, "*steps tokens draft_vocab"]:
        """Return the gradient of scale * value with respect to the draft's logits."""
        grad = draft.probs * (-scale * self.slope_sum)[..., None]
        for factor, term in self.slope_terms:
            grad.addcmul_(term, (scale * factor)[..., None])
        grad = draft.expand_grad(grad)
        if self.label is not None:
            grad.scatter_add_(-1, self.label[..., None], -scale[..., None])
        return grad


def soft_cross_entropy(draft: DraftDistribution, _conf: LossConf) -> LossTerm:
    """Return the cross entropy with the target's distribution."""
    soft = draft.target_dist.soft
    return LossTerm(
        value=-(soft * draft.log_probs).sum(-1), slope_terms=[(-1.0, soft)], slope_sum=-1.0
    )


def forward_kl(draft: DraftDistribution, _conf: LossConf) -> LossTerm:
    """Return KL(target || draft)."""
    soft, log_soft = draft.target_dist.soft, draft.target_dist.log_soft
    return LossTerm(
        # The negative entropy is one for all steps, so this has a pass less than one difference.
        value=(soft * log_soft).sum(-1) - (soft * draft.log_probs).sum(-1),
        slope_terms=[(-1.0, soft)],
        slope_sum=-1.0,
    )


def reverse_kl(draft: DraftDistribution, _conf: LossConf) -> LossTerm:
    """Return KL(draft || target)."""
    slope = draft.probs * (draft.log_probs - draft.target_dist.log_soft)
    value = slope.sum(-1)
    return LossTerm(value=value, slope_terms=[(1.0, slope)], slope_sum=value)


def jensen_shannon(draft: DraftDistribution, conf: LossConf) -> LossTerm:
    """Return the generalized Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649).

    It is beta KL(target || mixed) + (1 - beta) KL(draft || mixed), with mixed = beta target +
    (1 - beta) draft. It vanishes as beta approaches 0 or 1: divided by beta it tends to the forward
    KL at 0, divided by 1 - beta to the reverse KL at 1. At exactly 0 and 1 the loss is these KLs,
    undivided, as in TRL.
    """
    beta, target_dist = conf.beta, draft.target_dist
    if beta in (0, 1):
        return reverse_kl(draft, conf) if beta else forward_kl(draft, conf)
    log_mixed = torch.lerp(draft.probs, target_dist.soft, beta).clamp_min(TINY).log()
    slope = draft.probs * (draft.log_probs - log_mixed)
    to_draft = slope.sum(-1)
    to_target = (target_dist.soft * (target_dist.log_soft - log_mixed)).sum(-1)
    return LossTerm(
        value=beta * to_target + (1 - beta) * to_draft,
        slope_terms=[(1 - beta, slope)],
        slope_sum=(1 - beta) * to_draft,
    )


def total_variation(draft: DraftDistribution, _conf: LossConf) -> LossTerm:
    """Return 1 - alpha: the total variation distance, which is the rejection probability."""
    below = draft.probs_below_target()
    return LossTerm(value=1 - draft.alpha, slope_terms=[(-1.0, below)], slope_sum=-below.sum(-1))


def cross_entropy(draft: DraftDistribution, _conf: LossConf) -> LossTerm:
    """Return the cross entropy with the text's token."""
    label, log_prob = draft.target_dist.label, draft.label_log_prob
    assert label is not None, "loss.name=ce: needs labels"
    assert log_prob is not None
    return LossTerm(
        value=-log_prob,
        slope_terms=[],
        slope_sum=-1.0,
        label=label.expand(draft.alpha.shape),
    )


def lk_hybrid(draft: DraftDistribution, conf: LossConf) -> LossTerm:
    """Return the LK hybrid loss (https://arxiv.org/abs/2602.23881).

    It moves from the forward KL to `tv` as the draft gets better: it is kl_weight * KL +
    (1 - kl_weight) * (1 - alpha), with kl_weight = exp(-loss.lk_eta * alpha), which the gradient
    treats as a constant.
    """
    kl, soft, below = forward_kl(draft, conf), draft.target_dist.soft, draft.probs_below_target()
    kl_weight = torch.exp(-conf.lk_eta * draft.alpha.detach())
    return LossTerm(
        value=kl_weight * kl.value + (1 - kl_weight) * (1 - draft.alpha),
        slope_terms=[(-kl_weight, soft), (kl_weight - 1, below)],
        slope_sum=-kl_weight - (1 - kl_weight) * below.sum(-1),
    )


def topk_kl(draft: DraftDistribution, conf: LossConf) -> LossTerm:
    """Return the forward KL over the target's k likeliest tokens and one bucket of all others."""
    soft = draft.target_dist.soft
    num_tokens = draft.target_dist.num_token_columns  # without the bucket of a coarse target
    top_probs, ids = soft[..., :num_tokens].topk(min(conf.top_k, num_tokens), -1)
    target_rest = soft.scatter(-1, ids, 0.0).sum(-1)
    ids = ids.expand(*draft.alpha.shape, -1)
    rest_log_probs = draft.log_probs.scatter(-1, ids, LOG_ZERO)
    # A sharp draft's probability of the bucket would underflow, so only its logarithm is used.
    log_rest = rest_log_probs.logsumexp(-1)
    entropy = torch.special.entr(top_probs).sum(-1) + torch.special.entr(target_rest)
    cross = (top_probs * draft.log_probs.gather(-1, ids)).sum(-1) + target_rest * log_rest
    target_probs = (
        (rest_log_probs + (target_rest.clamp_min(TINY).log() - log_rest)[..., None])
        .exp()
        .scatter(-1, ids, top_probs.expand(ids.shape))
    )
    return LossTerm(value=-entropy - cross, slope_terms=[(-1.0, target_probs)], slope_sum=-1.0)
