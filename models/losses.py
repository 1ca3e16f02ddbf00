"""Distillation losses: how far a draft is from its target, token by token, in fp32.

soft_ce    cross entropy with the target's distribution, renormalised over the draft's vocabulary.
lk_hybrid  lambda * KL + (1 - lambda) * (1 - alpha), lambda = exp(-eta * alpha), after
           https://arxiv.org/abs/2602.23881; alpha = sum_v min(target, draft) is the chance that
           the target accepts a draft token, so its target probabilities are not renormalised.

A row whose likeliest target token is outside the draft's vocabulary is not `covered`: its loss is 0
(as in EAGLE-3) though its weight stays in the denominator, and in the metrics it counts as a miss.

`chunked_distillation` applies the output heads too and never holds [tokens, vocab] for more than a
chunk; it equals `distillation`, the plain form, in value and gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.errors import UserError

Head = Float[Tensor, "vocab width"] | Callable[[Tensor], Tensor]
Metrics = dict[str, Float[Tensor, "*steps 2"]]  # name -> (sum, count) of each step
METRICS = ("loss", "alpha", "hit", "covered")


class LossName(Enum):
    """What is minimised."""

    soft_ce = "soft_ce"
    lk_hybrid = "lk_hybrid"


class Reduction(Enum):
    """Whether every sequence or every token has the same weight."""

    sequence = "sequence"
    token = "token"


@dataclass(kw_only=True)
class LossConf:
    """What a draft minimises."""

    name: LossName = LossName.soft_ce
    lk_eta: float = 3.0
    step_decay: float = 0.8  # weight of each further step of the unroll
    reduction: Reduction = Reduction.sequence
    chunk: int = 1024  # tokens whose logits are held at a time

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise UserError(
                f"loss.chunk: must be at least 1, got {self.chunk}; the default is 1024"
            )
        if not 0 < self.step_decay <= 1:
            raise UserError(
                f"loss.step_decay: must be in (0, 1], got {self.step_decay}; 1 weighs steps equally"
            )
        if self.lk_eta < 0:
            raise UserError(
                f"loss.lk_eta: must not be negative, got {self.lk_eta}; the default is 3"
            )


@dataclass(kw_only=True)
class TokenLosses:
    """What each draft row is worth."""

    loss: Float[Tensor, "*steps tokens"]
    alpha: Float[Tensor, "*steps tokens"]  # 1 - total variation distance
    hit: Bool[Tensor, "*steps tokens"]  # the draft's likeliest token is the target's
    covered: Bool[Tensor, "*steps tokens"]  # the target's likeliest token is one the draft has

    def sums(self, counted: Bool[Tensor, "*steps tokens"]) -> Metrics:
        """Each metric's (sum, count) over the counted rows, by step. The loss is unweighted."""
        count = counted.sum(-1).float()
        return {
            name: torch.stack([getattr(self, name).float().mul(counted).sum(-1), count], -1)
            for name in METRICS
        }


@dataclass(kw_only=True)
class _Teacher:
    """The target's distribution as a draft vocabulary sees it."""

    probs: Float[Tensor, "tokens draft_vocab"]  # of the target: sums to less than 1 if reduced
    soft: Float[Tensor, "tokens draft_vocab"]  # renormalised over the draft's vocabulary
    best: Int[Tensor, " tokens"]  # likeliest token of the whole vocabulary, a target id
    covered: Bool[Tensor, " tokens"]


def _teach(
    logits: Float[Tensor, "tokens vocab"], kept_ids: Int[Tensor, " draft_vocab"] | None
) -> _Teacher:
    logits = logits.float()
    best = logits.argmax(-1)
    if kept_ids is None:
        probs = logits.softmax(-1)
        return _Teacher(probs=probs, soft=probs, best=best, covered=torch.ones_like(best).bool())
    kept = logits.index_select(-1, kept_ids)
    return _Teacher(
        probs=(kept - logits.logsumexp(-1, keepdim=True)).exp(),
        soft=kept.softmax(-1),
        best=best,
        covered=kept_ids[kept.argmax(-1)] == best,
    )


def _compare(
    draft_logits: Tensor, teacher: _Teacher, kept_ids: Tensor | None, conf: LossConf
) -> tuple[TokenLosses, Tensor]:
    """The losses, and the draft's distributions, which the gradient needs again."""
    draft_log_probs = draft_logits.log_softmax(-1)
    draft_probs = draft_log_probs.exp()
    # where, not minimum: its gradient at a tie is the one `_gradient` takes
    alpha = torch.where(draft_probs < teacher.probs, draft_probs, teacher.probs).sum(-1)
    loss = -(teacher.soft * draft_log_probs).sum(-1)
    if conf.name is LossName.lk_hybrid:
        kl = loss - torch.special.entr(teacher.soft).sum(-1)
        trust = torch.exp(-conf.lk_eta * alpha.detach())
        loss = trust * kl + (1 - trust) * (1 - alpha)
    best = draft_logits.argmax(-1)
    best = best if kept_ids is None else kept_ids[best]
    covered = teacher.covered.expand(loss.shape)
    hit = best == teacher.best
    return TokenLosses(loss=loss * covered, alpha=alpha, hit=hit, covered=covered), draft_probs


def _gradient(
    draft_probs: Tensor, teacher: _Teacher, losses: TokenLosses, weight: Tensor, conf: LossConf
) -> Tensor:
    """Gradient of each row's weighted loss in `_compare` with respect to its draft logits.

    Scales of a row are multiplied first: each operation on the vocabulary is a pass over memory.
    """
    scale = (weight * losses.covered)[..., None]
    if conf.name is LossName.soft_ce:
        return (draft_probs - teacher.soft) * scale
    trust = torch.exp(-conf.lk_eta * losses.alpha)[..., None]
    below = torch.where(draft_probs < teacher.probs, draft_probs, 0.0)
    raised = (1 - trust) * scale
    kept = trust * scale + raised * below.sum(-1, keepdim=True)
    grad = torch.addcmul(draft_probs * kept, teacher.soft, trust * scale, value=-1)
    return torch.addcmul(grad, below, raised, value=-1)


def token_losses(
    draft_logits: Float[Tensor, "*steps tokens draft_vocab"],
    target_logits: Float[Tensor, "tokens vocab"],
    *,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> TokenLosses:
    """Loss and metrics of each draft row. `kept_ids` are the draft vocabulary's target ids."""
    return _compare(draft_logits.float(), _teach(target_logits, kept_ids), kept_ids, conf)[0]


def _apply(head: Head, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, head) if isinstance(head, Tensor) else head(hidden)


def _through(heads: list[Tensor], rows: Float[Tensor, "*steps tokens _"]) -> Tensor:
    """Rows times the one head, or each step's rows times its own."""
    if len(heads) == 1:
        return nn.functional.linear(rows, heads[0])
    pairs = zip(rows, heads, strict=True)
    return torch.stack([nn.functional.linear(step, head) for step, head in pairs])


def distillation(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_hidden: Float[Tensor, "tokens target_width"],
    *,
    draft_heads: list[Tensor],
    target_head: Head,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,  # noqa: ARG001 - for the losses to come
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Sum of the weighted losses, and the metrics of the rows whose weight is not 0.

    Row t of every step is taught by row t of the target. Steps are optional, and share its logits.
    `draft_heads` [draft_vocab, draft_width]: one for all steps, or one for each of them.
    `labels`: the token of the text where row t of the target predicts, a target id.
    """
    target_logits = _apply(target_head, target_hidden).detach()
    draft_logits = _through(draft_heads, draft_hidden)
    losses = token_losses(draft_logits, target_logits, kept_ids=kept_ids, conf=conf)
    with torch.no_grad():
        metrics = losses.sums(weight != 0)
    return (losses.loss * weight).sum(), metrics


def chunked_distillation(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_hidden: Float[Tensor, "tokens target_width"],
    *,
    draft_heads: list[Tensor],
    target_head: Head,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,  # noqa: ARG001 - for the losses to come
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """`distillation`, holding the logits of `conf.chunk` draft rows at a time.

    Gradients are taken while a chunk's logits are there, so that nothing is computed twice.
    """
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        # Prompts and padding weigh nothing. Elsewhere leaving them out would make the device wait
        # for the host, and every batch a graph of its own.
        some = _weighed(weight)
        draft_hidden, target_hidden = draft_hidden.index_select(-2, some), target_hidden[some]
        weight = weight.index_select(-1, some)
    steps, tokens = draft_hidden.shape[:-2].numel(), draft_hidden.shape[-2]
    rows = max(1, conf.chunk // steps)  # of the target: a chunk counts the rows of all steps
    short = -tokens % rows  # the last chunk gets the others' shape
    draft_rows = nn.functional.pad(draft_hidden.detach(), (0, 0, 0, short)).split(rows, -2)
    target_rows = nn.functional.pad(target_hidden, (0, 0, 0, short)).split(rows, -2)
    weights = nn.functional.pad(weight, (0, short)).split(rows, -1)
    total = weight.new_zeros(())
    head_grads = [torch.zeros_like(head, dtype=torch.float32) for head in draft_heads]
    one = len(draft_heads) == 1
    chunk_sums: list[Metrics] = []
    hidden_grads: list[Tensor] = []

    with torch.no_grad():
        for hidden, seen, share in zip(draft_rows, target_rows, weights, strict=True):
            teacher = _teach(_apply(target_head, seen), kept_ids)
            logits = _through(draft_heads, hidden).float()
            losses, probs = _compare(logits, teacher, kept_ids, conf)
            total = total + (losses.loss * share).sum()
            chunk_sums.append(losses.sums(share != 0))
            grad = _gradient(probs, teacher, losses, share, conf).to(hidden.dtype)
            hidden_grads.append(_through([head.T for head in draft_heads], grad))
            for i, head in enumerate(draft_heads):
                if head.requires_grad:
                    g, h = (grad, hidden) if one else (grad[i], hidden[i])
                    head_grads[i] += g.flatten(0, -2).T @ h.flatten(0, -2)
        hidden_grad = torch.cat(hidden_grads, -2).narrow(-2, 0, tokens)
        metrics = {
            name: torch.stack([sums[name] for sums in chunk_sums]).sum(0) for name in METRICS
        }

    total = _carry(total, draft_hidden, hidden_grad)
    for head, grad in zip(draft_heads, head_grads, strict=True):
        total = _carry(total, head, grad)
    return total, metrics


def _weighed(weight: Float[Tensor, "*steps tokens"]) -> Int[Tensor, " some"]:
    """Rows that have a weight at some step; the first one where none has."""
    found = (weight != 0).flatten(0, -2).any(0) if weight.ndim > 1 else weight != 0
    return found.nonzero()[:, 0] if found.any() else torch.zeros(1, dtype=torch.int64)


def _carry(value: Tensor, source: Tensor, grad: Tensor) -> Tensor:
    """`value`, whose backward gives `source` this gradient: it adds a zero that has it."""
    if not source.requires_grad:
        return value
    carrier = (source * grad).sum()
    return value + (carrier - carrier.detach())
