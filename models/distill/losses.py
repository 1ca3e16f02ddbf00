"""Distillation losses: how far a draft is from its target, token by token, and what that teaches.

`models.distill.divergences` says what each loss is; here are their settings, the heads and the
chunks.

A row whose likeliest target token (for `ce`: whose own token) is outside the draft's vocabulary is
not `covered`: its loss is 0 (as in EAGLE-3) though its weight stays in the denominator, and in the
metrics it counts as a miss.

`chunked_distillation` applies the output heads too and never holds [tokens, vocab] for more than a
chunk; it equals `distillation`, the plain form, in value and gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.distill import divergences
from models.distill.divergences import Divergence, Rows, Teacher
from models.distill.topk_logits import TopK
from models.errors import UserError

Head = Float[Tensor, "vocab width"] | Callable[[Tensor], Tensor]
Metrics = dict[str, Float[Tensor, "*steps 2"]]  # name -> (sum, count) of each step
METRICS = ("loss", "alpha", "hit", "covered")


class LossName(Enum):
    """What is minimised."""

    soft_ce = "soft_ce"
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    tv = "tv"
    ce = "ce"
    lk_hybrid = "lk_hybrid"
    topk_kl = "topk_kl"


class Reduction(Enum):
    """Whether every sequence or every token has the same weight."""

    sequence = "sequence"
    token = "token"


@dataclass(kw_only=True)
class LossConf:
    """What a draft minimises."""

    name: LossName = LossName.soft_ce
    beta: float = 0.5  # jsd: from the forward KL at 0 to the reverse KL at 1
    lk_eta: float = 3.0  # lk_hybrid
    top_k: int = 10  # topk_kl
    temperature: float = 1.0  # of both models, in the metric alpha too
    step_decay: float = 0.8  # weight of each further drafted position
    half_life: int | None = None  # answer tokens after which a token weighs half; None = all alike
    reduction: Reduction = Reduction.sequence
    chunk: int = 1024  # tokens whose logits are held at a time

    def __post_init__(self) -> None:
        for key, good, rule, remedy in (
            ("beta", 0 <= self.beta <= 1, "must be in [0, 1]", "the default is 0.5"),
            ("lk_eta", self.lk_eta >= 0, "must not be negative", "the default is 3"),
            ("top_k", self.top_k >= 1, "must be at least 1", "the default is 10"),
            ("temperature", self.temperature > 0, "must be above 0", "the default is 1"),
            ("step_decay", 0 < self.step_decay <= 1, "must be in (0, 1]", "1 weighs steps equally"),
            (
                "half_life", self.half_life is None or self.half_life >= 1,
                "must be at least 1", "null weighs all tokens alike",
            ),
            ("chunk", self.chunk >= 1, "must be at least 1", "the default is 1024"),
        ):  # fmt: skip
            if not good:
                raise UserError(f"loss.{key}: {rule}, got {getattr(self, key)}; {remedy}")


LOSSES: dict[LossName, Callable[[Rows, LossConf], Divergence]] = {
    LossName.soft_ce: lambda rows, _: divergences.soft_ce(rows),
    LossName.forward_kl: lambda rows, _: divergences.forward_kl(rows),
    LossName.reverse_kl: lambda rows, _: divergences.reverse_kl(rows),
    LossName.jsd: lambda rows, conf: divergences.jsd(rows, beta=conf.beta),
    LossName.tv: lambda rows, _: divergences.tv(rows),
    LossName.ce: lambda rows, _: divergences.ce(rows),
    LossName.lk_hybrid: lambda rows, conf: divergences.lk_hybrid(rows, eta=conf.lk_eta),
    LossName.topk_kl: lambda rows, conf: divergences.topk_kl(rows, k=conf.top_k),
}


@dataclass(kw_only=True)
class TokenLosses:
    """What each draft row is worth."""

    loss: Float[Tensor, "*steps tokens"]
    alpha: Float[Tensor, "*steps tokens"]  # 1 - total variation distance
    hit: Bool[Tensor, "*steps tokens"]  # the draft's likeliest token is the target's
    covered: Bool[Tensor, "*steps tokens"]  # the draft's vocabulary has what the loss teaches

    def sums(self, counted: Bool[Tensor, "*steps tokens"]) -> Metrics:
        """Each metric's (sum, count) over the counted rows, by step. The loss is unweighted."""
        count = counted.sum(-1).float()
        return {
            name: torch.stack([getattr(self, name).float().mul(counted).sum(-1), count], -1)
            for name in METRICS
        }


def _teach(
    said: Tensor | TopK, labels: Tensor | None, kept_ids: Tensor | None, conf: LossConf
) -> Teacher:
    """From the target's logits, or from its likeliest tokens."""
    labels = labels if conf.name is LossName.ce else None
    if isinstance(said, TopK):
        assert conf.temperature == 1, "loss.temperature: of the bucket it is known at 1 alone"
        return divergences.teach_top(said, labels=labels, kept_ids=kept_ids)
    return divergences.teach(said, labels=labels, kept_ids=kept_ids, temperature=conf.temperature)


def _judge(rows: Rows, kept_ids: Tensor | None, conf: LossConf) -> tuple[TokenLosses, Divergence]:
    teacher, found = rows.teacher, LOSSES[conf.name](rows, conf)
    best = rows.best if kept_ids is None else kept_ids[rows.best]
    covered = teacher.covered.expand(best.shape)
    losses = TokenLosses(
        loss=found.value * covered, alpha=rows.alpha, hit=best == teacher.best, covered=covered
    )
    return losses, found


def token_losses(
    draft_logits: Float[Tensor, "*steps tokens draft_vocab"],
    target_logits: Float[Tensor, "tokens vocab"] | TopK,
    *,
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> TokenLosses:
    """Loss and metrics of each draft row. `kept_ids` are the draft vocabulary's target ids."""
    teacher = _teach(target_logits, labels, kept_ids, conf)
    rows = divergences.compare(draft_logits, teacher, temperature=conf.temperature)
    return _judge(rows, kept_ids, conf)[0]


def _says(head: Head, rows: Tensor | TopK) -> Tensor | TopK:
    """The target's logits, or what is known of them."""
    if isinstance(rows, TopK):
        return rows
    logits = nn.functional.linear(rows, head) if isinstance(head, Tensor) else head(rows)
    return logits.detach()


def _through(heads: list[Tensor], rows: Float[Tensor, "*steps tokens _"]) -> Tensor:
    """Rows times the one head, or each step's rows times its own."""
    if len(heads) == 1:
        return nn.functional.linear(rows, heads[0])
    pairs = zip(rows, heads, strict=True)
    return torch.stack([nn.functional.linear(step, head) for step, head in pairs])


def distillation(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_rows: Float[Tensor, "tokens target_width"] | TopK,
    *,
    draft_heads: list[Tensor],
    target_head: Head,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Sum of the weighted losses, and the metrics of the rows whose weight is not 0.

    Row t of every step is taught by row t of the target: by what its head makes of a hidden state,
    or by its likeliest tokens. Steps are optional, and share them.
    `draft_heads` [draft_vocab, draft_width]: one for all steps, or one for each of them.
    `labels`: the token of the text where row t of the target predicts, a target id.
    """
    teacher = _teach(_says(target_head, target_rows), labels, kept_ids, conf)
    logits = _through(draft_heads, draft_hidden)
    rows = divergences.compare(logits, teacher, temperature=conf.temperature)
    losses, _ = _judge(rows, kept_ids, conf)
    with torch.no_grad():
        metrics = losses.sums(weight != 0)
    return (losses.loss * weight).sum(), metrics


def chunked_distillation(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_rows: Float[Tensor, "tokens target_width"] | TopK,
    *,
    draft_heads: list[Tensor],
    target_head: Head,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """`distillation`, holding the logits of `conf.chunk` draft rows at a time.

    Gradients are taken while a chunk's logits are there, so that nothing is computed twice.
    """
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        # Prompts and padding weigh nothing. Elsewhere leaving them out would make the device wait
        # for the host, and every batch a graph of its own.
        some = weight.reshape(-1, weight.shape[-1]).any(0).nonzero()[:, 0]
        draft_hidden = draft_hidden.index_select(-2, some)
        target_rows = _each(target_rows, lambda t: t[some])
        weight = weight.index_select(-1, some)
        labels = None if labels is None else labels[some]
    steps = draft_hidden.shape[:-2].numel()
    rows = max(1, conf.chunk // steps)  # of the target: a chunk counts the rows of all steps
    total = weight.new_zeros(())
    head_grads = [
        torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        for head in draft_heads
    ]
    chunk_sums: list[Metrics] = []
    hidden_grads: list[Tensor] = []

    with torch.no_grad():
        chunks = _chunks(draft_hidden.detach(), target_rows, weight, labels, rows=rows)
        for hidden, seen, share, said in chunks:
            teacher = _teach(_says(target_head, seen), said, kept_ids, conf)
            losses, grad = _learn(_through(draft_heads, hidden), teacher, share, kept_ids, conf)
            total = total + (losses.loss * share).sum()
            chunk_sums.append(losses.sums(share != 0))
            grad = grad.to(hidden.dtype)
            hidden_grads.append(_through([head.T for head in draft_heads], grad))
            _add_head_grads(head_grads, grad, hidden)
        hidden_grad = torch.cat(hidden_grads, -2).narrow(-2, 0, weight.shape[-1])
        metrics = {
            name: torch.stack([sums[name] for sums in chunk_sums]).sum(0) for name in METRICS
        }

    total = _carry(total, draft_hidden, hidden_grad)
    for head, head_grad in zip(draft_heads, head_grads, strict=True):
        total = _carry(total, head, head_grad)
    return total, metrics


def _each(rows: Tensor | TopK, change: Callable[[Tensor], Tensor]) -> Tensor | TopK:
    return rows.each(change) if isinstance(rows, TopK) else change(rows)


def _chunks(
    draft_hidden: Tensor, target_rows: Tensor | TopK, weight: Tensor, labels: Tensor | None, *,
    rows: int,
) -> Iterator[tuple[Tensor, Tensor | TopK, Tensor, Tensor | None]]:  # fmt: skip
    """`rows` of the target at a time, and what belongs to them. The last ones are filled with 0."""
    short, pad = -weight.shape[-1] % rows, nn.functional.pad
    weights = pad(weight, (0, short)).split(rows, -1)
    yield from zip(
        pad(draft_hidden, (0, 0, 0, short)).split(rows, -2),
        _each(target_rows, lambda t: pad(t, (0, 0) * (t.ndim - 1) + (0, short))).split(rows),
        weights,
        [None] * len(weights) if labels is None else pad(labels, (0, short)).split(rows),
        strict=True,
    )


def _learn(
    logits: Tensor, teacher: Teacher, weight: Tensor, kept_ids: Tensor | None, conf: LossConf
) -> tuple[TokenLosses, Tensor]:
    """Losses of a chunk, and the gradient of their weighted sum with respect to the logits."""
    rows = divergences.compare(logits, teacher, temperature=conf.temperature)
    losses, found = _judge(rows, kept_ids, conf)
    return losses, found.gradient(rows, weight * losses.covered / conf.temperature)


def _add_head_grads(head_grads: list[Tensor | None], grad: Tensor, hidden: Tensor) -> None:
    """Add what a chunk teaches the heads: each its own step, or the one all of them."""
    of_head = [(grad, hidden)] if len(head_grads) == 1 else zip(grad, hidden, strict=True)
    for head_grad, (g, h) in zip(head_grads, of_head, strict=True):
        if head_grad is not None:
            head_grad += g.flatten(0, -2).T @ h.flatten(0, -2)


def _carry(value: Tensor, source: Tensor, grad: Tensor | None) -> Tensor:
    """`value`, whose backward gives `source` this gradient: it adds a zero that has it."""
    if grad is None or not source.requires_grad:
        return value
    carrier = (source * grad).sum()
    return value + (carrier - carrier.detach())
