"""What each loss is: its value for a row of logits, and its slope over the vocabulary.

With draft = softmax(logits), a loss of that distribution has the gradient

    d loss / d logits = slope - draft * sum(slope),    slope_v = draft_v * (d loss / d draft_v)

so that value and slope are all there is to say of a loss: below, a few lines each. What is added to
the slope in proportion to the draft itself cancels, and is left out. Everything is in fp32.

`soft` is the target's distribution over the draft's vocabulary, renormalised. `probs` is not: it
gives the true chance that the target accepts, and sums to less than 1 where tokens are left out.

Of a target known by its k likeliest tokens (`TopK`) both distributions are made coarse: a column
for each of the k, and a last one, the bucket, for all other tokens together. The logit of the
bucket is the logsumexp of the others, so that columns are logits like any, every loss is the exact
divergence of the coarse distributions, and its gradient spreads from the bucket over the others in
proportion to the draft. What a bucket hides: docs/losses.md.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from models.distill.topk_logits import TopK

LEAST = -1e30  # the logarithm of nothing, which may be multiplied by weights and by 0
TINY = torch.finfo(torch.float32).tiny


@dataclass(kw_only=True)
class Teacher:
    """The target's distribution as a draft vocabulary sees it, a column a token or coarse."""

    probs: Float[Tensor, "tokens columns"]  # of the target: sums to less than 1 if reduced
    soft: Float[Tensor, "tokens columns"]  # renormalised over the draft's vocabulary
    log_soft: Float[Tensor, "tokens columns"]
    best: Int[Tensor, " tokens"]  # likeliest token of the whole vocabulary, a target id
    label: Int[Tensor, " tokens"] | None  # the text's own token, a draft id; 0 if not covered
    covered: Bool[Tensor, " tokens"]  # the draft's vocabulary has what the loss teaches
    columns: Int[Tensor, "tokens k"] | None = None  # draft ids if coarse; draft_vocab: it has none

    @property
    def tokens(self) -> int:
        """Columns that are one token each."""
        return (self.soft if self.columns is None else self.columns).shape[-1]


def teach(
    logits: Float[Tensor, "tokens vocab"], *, labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None, temperature: float,
) -> Teacher:  # fmt: skip
    """The target's rows. With `labels` (target ids) it is those that must be covered."""
    logits = logits.float()
    best = logits.argmax(-1)
    if temperature != 1:
        logits = logits / temperature
    if kept_ids is None:
        log_probs = logits.log_softmax(-1)
        probs = log_probs.exp()
        return Teacher(
            probs=probs, soft=probs, log_soft=log_probs, best=best, label=labels,
            covered=torch.ones_like(best).bool(),
        )  # fmt: skip
    taught = _draft_ids(kept_ids, logits.shape[-1])[best if labels is None else labels]
    kept = logits.index_select(-1, kept_ids)
    log_soft = kept.log_softmax(-1)
    return Teacher(
        probs=(kept - logits.logsumexp(-1, keepdim=True)).exp(),
        soft=log_soft.exp(),
        log_soft=log_soft,
        best=best,
        label=None if labels is None else taught.clamp_min(0),
        covered=taught >= 0,
    )


def _draft_ids(kept_ids: Int[Tensor, " draft_vocab"], vocab: int) -> Int[Tensor, " vocab"]:
    """Draft id of each target id, -1 where there is none."""
    places = torch.arange(len(kept_ids), device=kept_ids.device)
    return kept_ids.new_full((vocab,), -1).scatter(0, kept_ids, places)


def teach_top(
    top: TopK, *, labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
) -> Teacher:  # fmt: skip
    """The target's rows, coarse. A reduced vocabulary is taken to hold all of the bucket."""
    ids = top.ids.long()
    best = ids[:, 0]
    if kept_ids is None:
        columns, taught = ids, best if labels is None else labels
    else:
        draft_ids = _draft_ids(kept_ids, top.vocab)
        columns, taught = draft_ids[ids], draft_ids[best if labels is None else labels]
        columns = torch.where(columns < 0, len(kept_ids), columns)
    kept = columns < (top.vocab if kept_ids is None else len(kept_ids))
    known = torch.where(kept, top.log_probs.float().exp(), 0.0)
    probs = torch.cat([known, top.rest.float()[:, None]], -1)
    soft = probs / probs.sum(-1, keepdim=True).clamp_min(TINY)
    return Teacher(
        probs=probs, soft=soft, log_soft=soft.clamp_min(TINY).log(), best=best,
        label=None if labels is None else taught.clamp_min(0), covered=taught >= 0,
        columns=columns,
    )  # fmt: skip


@dataclass(kw_only=True)
class Rows:
    """The draft's rows, beside the teacher that all steps share: in the teacher's columns."""

    log_probs: Float[Tensor, "*steps tokens columns"]
    probs: Float[Tensor, "*steps tokens columns"]
    alpha: Float[Tensor, "*steps tokens"]  # chance that the target accepts what the draft samples
    best: Int[Tensor, "*steps tokens"]  # likeliest token, a draft id
    said: Float[Tensor, "*steps tokens"] | None  # log of the label's probability
    others: Float[Tensor, "*steps tokens _"] | None  # logits of the bucket's tokens, else -inf
    teacher: Teacher

    def rising(self) -> Float[Tensor, "*steps tokens columns"]:
        """The draft's probabilities where alpha rises with them: below the target's."""
        return torch.where(self.probs < self.teacher.probs, self.probs, 0.0)

    def spread(
        self, grad: Float[Tensor, "*steps tokens columns"]
    ) -> Float[Tensor, "*steps tokens draft_vocab"]:
        """The gradient of the draft's logits from that of its columns."""
        if self.others is None or self.teacher.columns is None:
            return grad
        columns = self.teacher.columns.expand(*grad.shape[:-1], -1)
        share = (self.others - _merged(self.others)).exp()
        return (share * grad[..., -1:]).scatter_(-1, columns, grad[..., :-1])[..., :-1]


def _merged(others: Tensor) -> Tensor:
    """The bucket's logit; `LEAST` where nothing is in it."""
    return others.logsumexp(-1, keepdim=True).clamp_min(LEAST)


def compare(
    logits: Float[Tensor, "*steps tokens draft_vocab"], teacher: Teacher, *, temperature: float
) -> Rows:
    """The draft's rows from its logits."""
    logits = logits.float()
    best = logits.argmax(-1)
    if temperature != 1:
        logits = logits / temperature
    others, seen = None, logits
    if teacher.columns is not None:
        columns = teacher.columns.expand(*logits.shape[:-1], -1)
        others = pad(logits, (0, 1), value=-torch.inf)  # a place for tokens that it does not have
        top, others = others.gather(-1, columns), others.scatter(-1, columns, -torch.inf)
        seen = torch.cat([top.clamp_min(LEAST), _merged(others)], -1)
    log_probs = seen.log_softmax(-1)
    probs = log_probs.exp()
    # where, not minimum: its gradient at a tie is the one of `rising`
    alpha = torch.where(probs < teacher.probs, probs, teacher.probs).sum(-1)
    said = None
    if teacher.label is not None:
        label = teacher.label.expand(best.shape)[..., None]
        said = logits.gather(-1, label)[..., 0] - seen.logsumexp(-1)
    return Rows(
        log_probs=log_probs, probs=probs, alpha=alpha, best=best, said=said, others=others,
        teacher=teacher,
    )  # fmt: skip


@dataclass(kw_only=True)
class Divergence:
    """A loss of each row, and its slope as a sum of parts: factor of the row * part.

    Kept apart, for each operation over the vocabulary is a pass over memory: the factors are
    multiplied by the row's weight before they meet it.
    """

    value: Float[Tensor, "*steps tokens"]
    parts: list[tuple[Tensor | float, Tensor]]  # ([*steps, tokens] or a number, [..., draft_vocab])
    total: Float[Tensor, "*steps tokens"] | float  # sum of the slope
    label: Int[Tensor, "*steps tokens"] | None = None  # a token whose slope is -1 besides, counted

    def gradient(
        self, rows: Rows, scale: Float[Tensor, "*steps tokens"]
    ) -> Float[Tensor, "*steps tokens draft_vocab"]:
        """Of scale * value with respect to the draft's logits."""
        grad = rows.probs * (-scale * self.total)[..., None]
        for factor, part in self.parts:
            grad.addcmul_(part, (scale * factor)[..., None])
        grad = rows.spread(grad)
        if self.label is not None:
            grad.scatter_add_(-1, self.label[..., None], -scale[..., None])
        return grad


def soft_ce(rows: Rows) -> Divergence:
    """Cross entropy with the target's distribution."""
    value = -(rows.teacher.soft * rows.log_probs).sum(-1)
    return Divergence(value=value, parts=[(-1.0, rows.teacher.soft)], total=-1.0)


def forward_kl(rows: Rows) -> Divergence:
    """KL(target || draft)."""
    teacher = rows.teacher
    value = (teacher.soft * (teacher.log_soft - rows.log_probs)).sum(-1)
    return Divergence(value=value, parts=[(-1.0, teacher.soft)], total=-1.0)


def reverse_kl(rows: Rows) -> Divergence:
    """KL(draft || target)."""
    slope = rows.probs * (rows.log_probs - rows.teacher.log_soft)
    value = slope.sum(-1)
    return Divergence(value=value, parts=[(1.0, slope)], total=value)


def jsd(rows: Rows, *, beta: float) -> Divergence:
    """Jensen-Shannon, generalised: beta KL(target || mixed) + (1 - beta) KL(draft || mixed).

    mixed = beta target + (1 - beta) draft, as in https://arxiv.org/abs/2306.13649 and TRL. It
    vanishes towards both ends: divided by beta it tends to the forward KL at 0, divided by 1 - beta
    to the reverse KL at 1. At 0 and 1 themselves it is those, undivided, as in TRL.
    """
    if beta == 0:
        return forward_kl(rows)
    if beta == 1:
        return reverse_kl(rows)
    teacher = rows.teacher
    log_mixed = torch.lerp(rows.probs, teacher.soft, beta).clamp_min(TINY).log()
    slope = rows.probs * (rows.log_probs - log_mixed)
    to_draft = slope.sum(-1)
    to_target = (teacher.soft * (teacher.log_soft - log_mixed)).sum(-1)
    return Divergence(
        value=beta * to_target + (1 - beta) * to_draft,
        parts=[(1 - beta, slope)],
        total=(1 - beta) * to_draft,
    )


def tv(rows: Rows) -> Divergence:
    """1 - alpha: the total variation distance, and the chance that a drafted token is rejected."""
    rising = rows.rising()
    return Divergence(value=1 - rows.alpha, parts=[(-1.0, rising)], total=-rising.sum(-1))


def ce(rows: Rows) -> Divergence:
    """Cross entropy with the text's own token."""
    label = rows.teacher.label
    assert label is not None, "loss.name=ce: needs labels"
    assert rows.said is not None
    return Divergence(value=-rows.said, parts=[], total=-1.0, label=label.expand(rows.alpha.shape))


def lk_hybrid(rows: Rows, *, eta: float) -> Divergence:
    """From the forward KL to `tv`, as the draft gets better: https://arxiv.org/abs/2602.23881.

    trust * KL + (1 - trust) * (1 - alpha), where trust = exp(-eta * alpha) is a constant for the
    gradient.
    """
    kl, soft, rising = forward_kl(rows), rows.teacher.soft, rows.rising()
    trust = torch.exp(-eta * rows.alpha.detach())
    return Divergence(
        value=trust * kl.value + (1 - trust) * (1 - rows.alpha),
        parts=[(-trust, soft), (trust - 1, rising)],
        total=-trust - (1 - trust) * rising.sum(-1),
    )


def topk_kl(rows: Rows, *, k: int) -> Divergence:
    """Forward KL over the target's k likeliest tokens and one bucket that holds all the others."""
    soft = rows.teacher.soft
    tokens = rows.teacher.tokens  # a bucket is none
    top, ids = soft[..., :tokens].topk(min(k, tokens), -1)
    other = soft.scatter(-1, ids, 0.0).sum(-1)
    ids = ids.expand(*rows.alpha.shape, -1)
    others = rows.log_probs.scatter(-1, ids, -torch.inf)
    # the bucket's share by its logarithm: a sharp draft's would underflow; -inf if nothing is left
    log_other = others.logsumexp(-1).clamp_min(LEAST)
    entropy = torch.special.entr(top).sum(-1) + torch.special.entr(other)
    cross = (top * rows.log_probs.gather(-1, ids)).sum(-1) + other * log_other
    pulled = (others + (other.clamp_min(TINY).log() - log_other)[..., None]).exp()
    pulled = pulled.scatter(-1, ids, top.expand(ids.shape))
    return Divergence(value=-entropy - cross, parts=[(-1.0, pulled)], total=-1.0)
