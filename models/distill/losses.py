"""Distillation losses: the distance of a draft from its target, token by token.

`models.distill.divergences` defines the losses, `config` their options; this file has the output
heads and the computation in chunks.

A row whose likeliest target token (for `ce`: whose text token) is outside the draft's vocabulary is
not `covered`: its loss is 0 (as in EAGLE-3), its weight stays in the denominator, and the metrics
count it as a miss.

`chunked_distillation_loss` also applies the output heads and never holds [tokens, vocab] for more
than one chunk; its value and gradient equal those of `distillation_loss`, the plain form.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.distill import divergences
from models.distill.config import LossConf, LossName
from models.distill.divergences import DraftDistribution, LossTerm, TargetDistribution
from models.distill.topk_logits import TopKLogits

TargetHead = Float[Tensor, "vocab width"] | Callable[[Tensor], Tensor]
Metrics = dict[str, Float[Tensor, "*steps 2"]]  # name -> (sum, count) of each step
METRIC_NAMES = ("loss", "alpha", "hit", "covered")


LOSS_FUNCTIONS: dict[LossName, Callable[[DraftDistribution, LossConf], LossTerm]] = {
    LossName.soft_ce: divergences.soft_cross_entropy,
    LossName.forward_kl: divergences.forward_kl,
    LossName.reverse_kl: divergences.reverse_kl,
    LossName.jsd: divergences.jensen_shannon,
    LossName.tv: divergences.total_variation,
    LossName.ce: divergences.cross_entropy,
    LossName.lk_hybrid: divergences.lk_hybrid,
    LossName.topk_kl: divergences.topk_kl,
}


@dataclass(kw_only=True)
class TokenLosses:
    """The loss and the metrics of each draft row."""

    loss: Float[Tensor, "*steps tokens"]
    alpha: Float[Tensor, "*steps tokens"]  # 1 - total variation distance
    hit: Bool[Tensor, "*steps tokens"]  # whether both models have the same likeliest token
    covered: Bool[Tensor, "*steps tokens"]  # whether the draft's vocabulary has the token

    def metric_sums(self, is_counted: Bool[Tensor, "*steps tokens"]) -> Metrics:
        """Return each metric's (sum, count) by step over the counted rows, without weights."""
        count = is_counted.sum(-1).float()
        return {
            name: torch.stack([getattr(self, name).float().mul(is_counted).sum(-1), count], -1)
            for name in METRIC_NAMES
        }


def build_target_distribution(
    head: TargetHead, target_rows: Tensor | TopKLogits, labels: Tensor | None,
    kept_ids: Tensor | None, conf: LossConf,
) -> TargetDistribution:  # fmt: skip
    """Build the distribution by the target's head, or from its likeliest tokens."""
    labels = labels if conf.name is LossName.ce else None
    if isinstance(target_rows, TopKLogits):
        assert conf.temperature == 1, "loss.temperature: must be 1 for top-k logits"
        return divergences.target_distribution_from_topk(
            target_rows, labels=labels, kept_ids=kept_ids
        )
    logits = (
        nn.functional.linear(target_rows, head) if isinstance(head, Tensor) else head(target_rows)
    )
    return divergences.target_distribution(
        logits.detach(), labels=labels, kept_ids=kept_ids, temperature=conf.temperature
    )


def evaluate_loss(
    draft_dist: DraftDistribution, kept_ids: Tensor | None, conf: LossConf
) -> tuple[TokenLosses, LossTerm]:
    """Return losses and metrics of each draft row, and the loss term that yields their gradient."""
    target_dist, term = draft_dist.target_dist, LOSS_FUNCTIONS[conf.name](draft_dist, conf)
    top_token = draft_dist.top_token if kept_ids is None else kept_ids[draft_dist.top_token]
    covered = target_dist.covered.expand(top_token.shape)
    return (
        TokenLosses(
            loss=term.value * covered,
            alpha=draft_dist.alpha,
            hit=top_token == target_dist.top_token,
            covered=covered,
        ),
        term,
    )


def _apply_heads(heads: list[Tensor], rows: Float[Tensor, "*steps tokens _"]) -> Tensor:
    """Multiply all rows by a shared head, or the rows of each step by the head of the step."""
    if len(heads) == 1:
        return nn.functional.linear(rows, heads[0])
    return torch.stack(
        [nn.functional.linear(step_rows, head) for step_rows, head in zip(rows, heads, strict=True)]
    )


def distillation_loss(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_rows: Float[Tensor, "tokens target_width"] | TopKLogits,
    *,
    draft_heads: list[Tensor],
    target_head: TargetHead,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Return the sum of the weighted losses, and the metrics of the rows whose weight is not 0.

    Row t of every step is compared with row t of the target, which is a hidden state for the
    target's head or the likeliest tokens. The step axis is optional; all steps share the target's
    rows.
    `draft_heads` [draft_vocab, draft_width]: one for all steps, or one for each of them.
    `labels`: the text's token at the position that row t of the target predicts, a target id.
    """
    target_dist = build_target_distribution(target_head, target_rows, labels, kept_ids, conf)
    draft_dist = divergences.draft_distribution(
        _apply_heads(draft_heads, draft_hidden), target_dist, temperature=conf.temperature
    )
    losses, _ = evaluate_loss(draft_dist, kept_ids, conf)
    with torch.no_grad():
        metrics = losses.metric_sums(weight != 0)
    return (losses.loss * weight).sum(), metrics


def chunked_distillation_loss(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_rows: Float[Tensor, "tokens target_width"] | TopKLogits,
    *,
    draft_heads: list[Tensor],
    target_head: TargetHead,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Compute `distillation_loss` with at most `conf.logits_chunk` rows of logits at once.

    The gradients of a chunk are computed along with its logits, so that nothing is computed twice.
    """
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        # Rows of prompts and padding weigh 0. On other devices dropping them would make the device
        # wait for the host, and give every batch its own graph.
        counted = weight.reshape(-1, weight.shape[-1]).any(0).nonzero()[:, 0]
        draft_hidden = draft_hidden.index_select(-2, counted)
        target_rows = _map_rows(target_rows, lambda t: t[counted])
        weight = weight.index_select(-1, counted)
        labels = None if labels is None else labels[counted]
    # `conf.logits_chunk` counts draft rows of all steps; a chunk has this many rows of the target.
    chunk_rows = max(1, conf.logits_chunk // draft_hidden.shape[:-2].numel())
    total = weight.new_zeros(())
    head_grads = [
        torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        for head in draft_heads
    ]
    chunk_sums: list[Metrics] = []
    hidden_grads: list[Tensor] = []

    with torch.no_grad():
        for hidden, target_chunk, chunk_weight, chunk_labels in _split_chunks(
            draft_hidden.detach(), target_rows, weight, labels, rows=chunk_rows
        ):
            target_dist = build_target_distribution(
                target_head, target_chunk, chunk_labels, kept_ids, conf
            )
            losses, grad = _loss_and_grad(
                _apply_heads(draft_heads, hidden), target_dist, chunk_weight, kept_ids, conf
            )
            total = total + (losses.loss * chunk_weight).sum()
            chunk_sums.append(losses.metric_sums(chunk_weight != 0))
            grad = grad.to(hidden.dtype)
            hidden_grads.append(_apply_heads([head.T for head in draft_heads], grad))
            _add_head_grads(head_grads, grad, hidden)
        hidden_grad = torch.cat(hidden_grads, -2).narrow(-2, 0, weight.shape[-1])
        metrics = {
            name: torch.stack([sums[name] for sums in chunk_sums]).sum(0) for name in METRIC_NAMES
        }

    total = _attach_grad(total, draft_hidden, hidden_grad)
    for head, head_grad in zip(draft_heads, head_grads, strict=True):
        total = _attach_grad(total, head, head_grad)
    return total, metrics


def _map_rows(rows: Tensor | TopKLogits, change: Callable[[Tensor], Tensor]) -> Tensor | TopKLogits:
    return rows.map_tensors(change) if isinstance(rows, TopKLogits) else change(rows)


def _split_chunks(
    draft_hidden: Tensor,
    target_rows: Tensor | TopKLogits,
    weight: Tensor,
    labels: Tensor | None,
    *,
    rows: int,
) -> Iterator[tuple[Tensor, Tensor | TopKLogits, Tensor, Tensor | None]]:
    """Yield chunks of `rows` target rows with all that belongs to them; pad the last with 0."""
    padding, pad = -weight.shape[-1] % rows, nn.functional.pad
    weights = pad(weight, (0, padding)).split(rows, -1)
    yield from zip(
        pad(draft_hidden, (0, 0, 0, padding)).split(rows, -2),
        _map_rows(target_rows, lambda t: pad(t, (0, 0) * (t.ndim - 1) + (0, padding))).split(rows),
        weights,
        [None] * len(weights) if labels is None else pad(labels, (0, padding)).split(rows),
        strict=True,
    )


def _loss_and_grad(
    logits: Tensor,
    target_dist: TargetDistribution,
    weight: Tensor,
    kept_ids: Tensor | None,
    conf: LossConf,
) -> tuple[TokenLosses, Tensor]:
    """Return the losses of a chunk, and the gradient of the logits of their weighted sum."""
    draft_dist = divergences.draft_distribution(logits, target_dist, temperature=conf.temperature)
    losses, term = evaluate_loss(draft_dist, kept_ids, conf)
    return losses, term.gradient(draft_dist, weight * losses.covered / conf.temperature)


def _add_head_grads(head_grads: list[Tensor | None], grad: Tensor, hidden: Tensor) -> None:
    """Add a chunk's gradients of the heads: of one head per step, or of one for all steps."""
    pairs = [(grad, hidden)] if len(head_grads) == 1 else zip(grad, hidden, strict=True)
    for head_grad, (g, h) in zip(head_grads, pairs, strict=True):
        if head_grad is not None:
            head_grad += g.flatten(0, -2).T @ h.flatten(0, -2)


def _attach_grad(value: Tensor, source: Tensor, grad: Tensor | None) -> Tensor:
    """Return `value` with `grad` as its gradient in `source`, by adding a zero that has it."""
    if grad is None or not source.requires_grad:
        return value
    carrier = (source * grad).sum()
    return value + (carrier - carrier.detach())
