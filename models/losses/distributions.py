"""The distributions that losses compare: that of the target, and that of the draft beside it.

`soft` is the target's distribution renormalized over the draft's vocabulary. `probs` is not
renormalized: it yields the true acceptance probability, and sums to less than 1 if the draft's
vocabulary lacks tokens. All computations are in fp32.

With only the target's k likeliest tokens (`TopKLogits`) both have a column for each of the k, and a
last one, the bucket, for all other tokens, whose logit is the logsumexp of theirs. Columns can be
used like logits; docs/losses.md explains what a bucket hides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from models.operators import topk_rows

# Stands for log(0), but stays finite when multiplied by weights or by 0; and not every compiler
# computes with -inf.
LOG_ZERO = -1e30
TINY = torch.finfo(torch.float32).tiny


@dataclass(kw_only=True)
class TopKLogits:
    """The target's k likeliest tokens in descending order: small enough for a feature store."""

    ids: Int[Tensor, "*batch k"]
    log_probs: Float[Tensor, "*batch k"]  # at temperature 1
    rest: Float[Tensor, "*batch"]  # probability of all other tokens
    vocab_size: int  # of the target

    @classmethod
    def from_logits(cls, logits: Float[Tensor, "*batch vocab"], k: int) -> "TopKLogits":
        """Build it from the target's logits."""
        log_probs = logits.float().log_softmax(-1)
        top, ids = topk_rows(log_probs, min(k, logits.shape[-1]))
        # a sum over the others, as 1 - the sum of the top would lose tiny values
        rest = log_probs.exp().scatter(-1, ids, 0.0).sum(-1)
        return cls(ids=ids, log_probs=top, rest=rest, vocab_size=logits.shape[-1])

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "TopKLogits":
        """Return a copy whose tensors are `change` of these."""
        return TopKLogits(
            ids=change(self.ids), log_probs=change(self.log_probs), rest=change(self.rest), vocab_size=self.vocab_size
        )


@dataclass(kw_only=True)
class TargetDistribution:
    """The target's distribution over a draft vocabulary: one column per token, or coarse."""

    probs: Float[Tensor, "tokens columns"]  # sums to less than 1 if the vocabulary is reduced
    soft: Float[Tensor, "tokens columns"]  # renormalized over the draft's vocabulary
    log_soft: Float[Tensor, "tokens columns"]
    # The likeliest token of the target's vocabulary, a target id.
    top_token: Int[Tensor, " tokens"]
    # The text's token, a draft id; 0 if not covered.
    label: Int[Tensor, " tokens"] | None
    # Whether the draft's vocabulary has the token that the loss supervises.
    covered: Bool[Tensor, " tokens"]
    # If coarse, the draft ids of the columns; draft_vocab for a token that the draft lacks.
    column_ids: Int[Tensor, "tokens k"] | None = None


def target_distribution(
    logits: Float[Tensor, "tokens vocab"],
    *,
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    temperature: float,
) -> TargetDistribution:
    """Return the target's distribution over the draft's vocabulary.

    With `labels` (target ids), `covered` tells whether the draft has the label of each token
    instead of the target's likeliest token.
    """
    logits = logits.float()
    # The first of equals, like argmax, which takes twice as long.
    top_token = logits.max(-1).indices
    if temperature != 1:
        logits = logits / temperature
    log_probs = logits.log_softmax(-1)
    if kept_ids is None:
        probs = log_probs.exp()
        covered = torch.ones_like(top_token).bool()
        return TargetDistribution(
            probs=probs, soft=probs, log_soft=log_probs, top_token=top_token, label=labels, covered=covered
        )
    draft_ids = _draft_id_lookup(kept_ids, logits.shape[-1])
    supervised_id = draft_ids[top_token if labels is None else labels]
    # A logsumexp of the logits would take five times as long on a CPU as this log_softmax.
    kept_log_probs = log_probs.index_select(-1, kept_ids)
    log_soft = kept_log_probs.log_softmax(-1)
    return TargetDistribution(
        probs=kept_log_probs.exp(),
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
    top: TopKLogits, *, labels: Int[Tensor, " tokens"] | None, kept_ids: Int[Tensor, " draft_vocab"] | None
) -> TargetDistribution:
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
        probs=probs,
        soft=soft,
        log_soft=soft.clamp_min(TINY).log(),
        top_token=ids[:, 0],
        label=None if labels is None else supervised_id.clamp_min(0),
        covered=supervised_id >= 0,
        column_ids=torch.where(columns < 0, len(kept_ids), columns),
    )


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

    def expand_grad(
        self, grad: Float[Tensor, "*steps tokens columns"], target: TargetDistribution
    ) -> Float[Tensor, "*steps tokens draft_vocab"]:
        """Return the gradient with respect to the draft's logits, given that of its columns."""
        if self.bucket_logits is None or target.column_ids is None:
            return grad
        columns = target.column_ids.expand(*grad.shape[:-1], -1)
        share = (self.bucket_logits - _bucket_logit(self.bucket_logits)).exp()
        # The last column of the result belongs to tokens that the draft lacks.
        return (share * grad[..., -1:]).scatter_(-1, columns, grad[..., :-1])[..., :-1]


def draft_distribution(
    logits: Float[Tensor, "*steps tokens draft_vocab"], target: TargetDistribution, *, temperature: float
) -> DraftDistribution:
    """Return the draft's distribution in the columns of the target's, given the draft's logits."""
    logits = logits.float()
    top_token = logits.max(-1).indices
    if temperature != 1:
        logits = logits / temperature
    bucket_logits, column_logits = None, logits
    if target.column_ids is not None:
        columns = target.column_ids.expand(*logits.shape[:-1], -1)
        padded = pad(logits, (0, 1), value=LOG_ZERO)  # for tokens that the draft lacks
        bucket_logits = padded.scatter(-1, columns, LOG_ZERO)
        column_logits = torch.cat([padded.gather(-1, columns), _bucket_logit(bucket_logits)], -1)
    log_probs = column_logits.log_softmax(-1)
    probs = log_probs.exp()
    # At a tie, the gradient of `where` is that of `lk_hybrid_grad`; that of `minimum`, which is one
    # pass less, is not.
    smaller = (
        torch.where(probs < target.probs, probs, target.probs)
        if torch.is_grad_enabled()
        else torch.minimum(probs, target.probs)
    )
    label_log_prob = None
    if target.label is not None:
        label = target.label.expand(top_token.shape)[..., None]
        label_log_prob = logits.gather(-1, label)[..., 0] - column_logits.logsumexp(-1)
    return DraftDistribution(
        log_probs=log_probs,
        probs=probs,
        alpha=smaller.sum(-1),
        top_token=top_token,
        label_log_prob=label_log_prob,
        bucket_logits=bucket_logits,
    )


def _bucket_logit(bucket_logits: Tensor) -> Tensor:
    """Return the logit of the bucket, or `LOG_ZERO` if it is empty."""
    return bucket_logits.logsumexp(-1, keepdim=True)
