"""What each loss is: its value for a row of logits, and its slope over the vocabulary.

With draft = softmax(logits), a loss of that distribution has the gradient

    d loss / d logits = slope - draft * sum(slope),    slope_v = draft_v * (d loss / d draft_v)

so that value and slope are all there is to say of a loss: below, a few lines each. What is added to
the slope in proportion to the draft itself cancels, and is left out. Everything is in fp32.

`soft` is the target's distribution over the draft's vocabulary, renormalised. `probs` is not: it
gives the true chance that the target accepts, and sums to less than 1 where tokens are left out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


@dataclass(kw_only=True)
class Teacher:
    """The target's distribution as a draft vocabulary sees it."""

    probs: Float[Tensor, "tokens draft_vocab"]  # of the target: sums to less than 1 if reduced
    soft: Float[Tensor, "tokens draft_vocab"]  # renormalised over the draft's vocabulary
    log_soft: Float[Tensor, "tokens draft_vocab"]
    best: Int[Tensor, " tokens"]  # likeliest token of the whole vocabulary, a target id
    label: Int[Tensor, " tokens"] | None  # the text's own token, a draft id; 0 if not covered
    covered: Bool[Tensor, " tokens"]  # the draft's vocabulary has what the loss teaches


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
    places = torch.arange(len(kept_ids), device=kept_ids.device)
    draft_ids = kept_ids.new_full((logits.shape[-1],), -1).scatter(0, kept_ids, places)
    taught = draft_ids[best if labels is None else labels]
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


@dataclass(kw_only=True)
class Rows:
    """The draft's rows, beside the teacher that all steps share."""

    log_probs: Float[Tensor, "*steps tokens draft_vocab"]
    probs: Float[Tensor, "*steps tokens draft_vocab"]
    alpha: Float[Tensor, "*steps tokens"]  # chance that the target accepts what the draft samples
    best: Int[Tensor, "*steps tokens"]  # likeliest token, a draft id
    teacher: Teacher

    def rising(self) -> Float[Tensor, "*steps tokens draft_vocab"]:
        """The draft's probabilities where alpha rises with them: below the target's."""
        return torch.where(self.probs < self.teacher.probs, self.probs, 0.0)


def compare(
    logits: Float[Tensor, "*steps tokens draft_vocab"], teacher: Teacher, *, temperature: float
) -> Rows:
    """The draft's rows from its logits."""
    logits = logits.float()
    best = logits.argmax(-1)
    if temperature != 1:
        logits = logits / temperature
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    # where, not minimum: its gradient at a tie is the one of `rising`
    alpha = torch.where(probs < teacher.probs, probs, teacher.probs).sum(-1)
    return Rows(log_probs=log_probs, probs=probs, alpha=alpha, best=best, teacher=teacher)


@dataclass(kw_only=True)
class Divergence:
    """A loss of each row, and its slope as a sum of parts: factor of the row * part.

    Kept apart, for each operation over the vocabulary is a pass over memory: the factors are
    multiplied by the row's weight before they meet it.
    """

    value: Float[Tensor, "*steps tokens"]
    parts: list[tuple[Tensor | float, Tensor]]  # ([*steps, tokens] or a number, [..., draft_vocab])
    total: Float[Tensor, "*steps tokens"] | float  # sum of the slope

    def gradient(
        self, rows: Rows, scale: Float[Tensor, "*steps tokens"]
    ) -> Float[Tensor, "*steps tokens draft_vocab"]:
        """Of scale * value with respect to the draft's logits."""
        grad = rows.probs * (-scale * self.total)[..., None]
        for factor, part in self.parts:
            grad.addcmul_(part, (scale * factor)[..., None])
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
    label = label.expand(rows.alpha.shape)[..., None]
    value = -rows.log_probs.gather(-1, label)[..., 0]
    one = torch.zeros_like(rows.probs).scatter(-1, label, 1.0)
    return Divergence(value=value, parts=[(-1.0, one)], total=-1.0)


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
    top, ids = soft.topk(min(k, soft.shape[-1]), -1)
    other = soft.scatter(-1, ids, 0.0).sum(-1)
    ids = ids.expand(*rows.alpha.shape, -1)
    others = rows.log_probs.scatter(-1, ids, -torch.inf)
    # the bucket's share by its logarithm: a sharp draft's would underflow; -inf if nothing is left
    log_other = others.logsumexp(-1).clamp_min(torch.finfo(torch.float32).min)
    entropy = torch.special.entr(top).sum(-1) + torch.special.entr(other)
    cross = (top * rows.log_probs.gather(-1, ids)).sum(-1) + other * log_other
    pulled = (others + (other.clamp_min(TINY).log() - log_other)[..., None]).exp()
    pulled = pulled.scatter(-1, ids, top.expand(ids.shape))
    return Divergence(value=-entropy - cross, parts=[(-1.0, pulled)], total=-1.0)
