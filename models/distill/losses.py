"""Distillation losses: the distance of a draft from its target, token by token.

`models.distill.divergences` defines the losses, `config` their options; this file has the output
heads and the computation in chunks.

A position whose likeliest target token (for `ce`: whose text token) is outside the draft's
vocabulary is not `covered`: its loss is 0 (as in EAGLE-3), its weight stays in the denominator, and
the metrics count it as a miss.

`chunked_distillation_loss` also applies the output heads and never holds [tokens, vocab] for more
than one chunk; its value and gradient equal those of `distillation_loss`, the plain form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.device.memory_trace import map_chunks
from models.distill import divergences
from models.distill.config import LossConf, LossName
from models.distill.divergences import DraftDistribution, LossTerm, TargetDistribution
from models.distill.topk_logits import TopKLogits

TargetHead = Float[Tensor, "vocab width"] | Callable[[Tensor], Tensor]
Metrics = dict[str, Float[Tensor, "*steps 2"]]  # name -> (sum, count) of each step
# Draft hidden states, target hidden states or top-k logits, weights, labels.
Chunk = tuple[Tensor, Tensor | TopKLogits, Tensor, Tensor | None]
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
    """The loss and the metrics of each drafted token."""

    loss: Float[Tensor, "*steps tokens"]
    alpha: Float[Tensor, "*steps tokens"]  # 1 - total variation distance
    hit: Bool[Tensor, "*steps tokens"]  # whether both models have the same likeliest token
    covered: Bool[Tensor, "*steps tokens"]  # whether the draft's vocabulary has the token

    def metric_sums(self, is_counted: Bool[Tensor, "*steps tokens"]) -> Metrics:
        """Return each metric's unweighted (sum, count) over the counted tokens: [*steps, 2]."""
        count = is_counted.sum(-1).float()
        return {
            name: torch.stack([getattr(self, name).float().mul(is_counted).sum(-1), count], -1)
            for name in METRIC_NAMES
        }


def build_target_distribution(
    head: TargetHead, target_hidden_or_topk: Tensor | TopKLogits, labels: Tensor | None,
    kept_ids: Tensor | None, conf: LossConf,
) -> TargetDistribution:  # fmt: skip
    """Return the target's distribution, from hidden states and its head or from top-k logits.

    `labels` are used only by `loss.name=ce`.
    """
    labels = labels if conf.name is LossName.ce else None
    if isinstance(target_hidden_or_topk, TopKLogits):
        assert conf.temperature == 1, "loss.temperature: must be 1 for top-k logits"
        return divergences.target_distribution_from_topk(
            target_hidden_or_topk, labels=labels, kept_ids=kept_ids
        )
    if isinstance(head, Tensor):
        logits = nn.functional.linear(target_hidden_or_topk, head)
    else:
        logits = head(target_hidden_or_topk)
    return divergences.target_distribution(
        logits.detach(), labels=labels, kept_ids=kept_ids, temperature=conf.temperature
    )


def evaluate_loss(
    draft_dist: DraftDistribution, kept_ids: Tensor | None, conf: LossConf
) -> tuple[TokenLosses, LossTerm]:
    """Return each token's loss and metrics, and the loss term that yields their gradient."""
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


def _apply_heads(heads: list[Tensor], hidden: Float[Tensor, "*steps tokens _"]) -> Tensor:
    """Return the product of all steps with a shared head, or of each step with its own head."""
    if len(heads) == 1:
        return nn.functional.linear(hidden, heads[0])
    return torch.stack(
        [
            nn.functional.linear(step_hidden, head)
            for step_hidden, head in zip(hidden, heads, strict=True)
        ]
    )


def distillation_loss(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_hidden_or_topk: Float[Tensor, "tokens target_width"] | TopKLogits,
    *,
    draft_heads: list[Tensor],
    target_head: TargetHead,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Return the sum of the weighted losses, and the metrics of the tokens whose weight is not 0.

    Token t of every step is compared with the target's distribution t, which all steps share. The
    step axis is optional.
    `target_hidden_or_topk`: hidden states for the target's head, or the likeliest tokens.
    `draft_heads` [draft_vocab, draft_width]: one for all steps, or one for each of them.
    `labels`: the text's token (a target id) that the target's distribution t predicts.
    """
    target_dist = build_target_distribution(
        target_head, target_hidden_or_topk, labels, kept_ids, conf
    )
    draft_dist = divergences.draft_distribution(
        _apply_heads(draft_heads, draft_hidden), target_dist, temperature=conf.temperature
    )
    losses, _ = evaluate_loss(draft_dist, kept_ids, conf)
    with torch.no_grad():
        metrics = losses.metric_sums(weight != 0)
    return (losses.loss * weight).sum(), metrics


def chunked_distillation_loss(
    draft_hidden: Float[Tensor, "*steps tokens draft_width"],
    target_hidden_or_topk: Float[Tensor, "tokens target_width"] | TopKLogits,
    *,
    draft_heads: list[Tensor],
    target_head: TargetHead,
    weight: Float[Tensor, "*steps tokens"],
    labels: Int[Tensor, " tokens"] | None,
    kept_ids: Int[Tensor, " draft_vocab"] | None,
    conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Return what `distillation_loss` does, holding at most `conf.logits_chunk` tokens' logits.

    The gradients of a chunk are computed along with its logits, so that nothing is computed twice.
    """
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        # Prompts and padding weigh 0. On other devices dropping them would make the device wait for
        # the host, and give every batch its own graph.
        counted = weight.reshape(-1, weight.shape[-1]).any(0).nonzero()[:, 0]
        draft_hidden = draft_hidden.index_select(-2, counted)
        target_hidden_or_topk = _map_tensors(target_hidden_or_topk, lambda t: t[counted])
        weight = weight.index_select(-1, counted)
        labels = None if labels is None else labels[counted]
    # `conf.logits_chunk` counts the drafted tokens of all steps, which share the target's.
    chunk_size = max(1, conf.logits_chunk // draft_hidden.shape[:-2].numel())
    total = weight.new_zeros(())
    head_grads = [
        torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        for head in draft_heads
    ]
    evaluate_chunk = partial(
        _evaluate_chunk, draft_heads=draft_heads, head_grads=head_grads, target_head=target_head,
        kept_ids=kept_ids, conf=conf,
    )  # fmt: skip
    with torch.no_grad():
        chunks = _split_chunks(
            draft_hidden.detach(), target_hidden_or_topk, weight, labels, size=chunk_size
        )
        losses, sums, hidden_grads = zip(*map_chunks(evaluate_chunk, chunks), strict=True)
        for loss in losses:
            total = total + loss
        # The last chunk was padded.
        hidden_grad = torch.cat(hidden_grads, -2).narrow(-2, 0, weight.shape[-1])
        metrics = {name: torch.stack([s[name] for s in sums]).sum(0) for name in METRIC_NAMES}

    total = _attach_grad(total, draft_hidden, hidden_grad)
    for head, head_grad in zip(draft_heads, head_grads, strict=True):
        total = _attach_grad(total, head, head_grad)
    return total, metrics


def _evaluate_chunk(
    chunk: Chunk, *, draft_heads: list[Tensor], head_grads: list[Tensor | None],
    target_head: TargetHead, kept_ids: Tensor | None, conf: LossConf,
) -> tuple[Float[Tensor, ""], Metrics, Tensor]:  # fmt: skip
    """Return the loss, its metrics and its gradient for the draft's hidden states.

    The gradients of the heads are added to `head_grads`.
    """
    hidden, target_hidden_or_topk, weight, labels = chunk
    target_dist = build_target_distribution(
        target_head, target_hidden_or_topk, labels, kept_ids, conf
    )
    losses, grad = _loss_and_grad(
        _apply_heads(draft_heads, hidden), target_dist, weight, kept_ids, conf
    )
    grad = grad.to(hidden.dtype)
    _add_head_grads(head_grads, grad, hidden)
    hidden_grad = _apply_heads([head.T for head in draft_heads], grad)
    return (losses.loss * weight).sum(), losses.metric_sums(weight != 0), hidden_grad


def _map_tensors(
    hidden_or_topk: Tensor | TopKLogits, change: Callable[[Tensor], Tensor]
) -> Tensor | TopKLogits:
    if isinstance(hidden_or_topk, TopKLogits):
        return hidden_or_topk.map_tensors(change)
    return change(hidden_or_topk)


def _split_chunks(
    draft_hidden: Tensor,
    target_hidden_or_topk: Tensor | TopKLogits,
    weight: Tensor,
    labels: Tensor | None,
    *,
    size: int,
) -> list[Chunk]:
    """Return the arguments in chunks of `size` target positions; pad the last chunk with 0.

    All chunks have one shape, so that they share a graph.
    """
    padding, pad = -weight.shape[-1] % size, nn.functional.pad
    weights = pad(weight, (0, padding)).split(size, -1)
    return list(zip(
        pad(draft_hidden, (0, 0, 0, padding)).split(size, -2),
        # The first axis is padded; the list of pads starts with the last one.
        _map_tensors(
            target_hidden_or_topk, lambda t: pad(t, (0, 0) * (t.ndim - 1) + (0, padding))
        ).split(size),
        weights,
        [None] * len(weights) if labels is None else pad(labels, (0, padding)).split(size),
        strict=True,
    ))  # fmt: skip


def _loss_and_grad(
    logits: Tensor,
    target_dist: TargetDistribution,
    weight: Tensor,
    kept_ids: Tensor | None,
    conf: LossConf,
) -> tuple[TokenLosses, Tensor]:
    """Return the losses of a chunk, and the gradient of their weighted sum for the logits."""
    draft_dist = divergences.draft_distribution(logits, target_dist, temperature=conf.temperature)
    losses, term = evaluate_loss(draft_dist, kept_ids, conf)
    return losses, term.gradient(draft_dist, weight * losses.covered / conf.temperature)


def _add_head_grads(head_grads: list[Tensor | None], grad: Tensor, hidden: Tensor) -> None:
    """Add a chunk's gradients to `head_grads`, in place: one head per step, or one for all steps.

    A frozen head has None there.
    """
    pairs = [(grad, hidden)] if len(head_grads) == 1 else zip(grad, hidden, strict=True)
    for head_grad, (logit_grad, head_input) in zip(head_grads, pairs, strict=True):
        if head_grad is not None:
            head_grad += logit_grad.flatten(0, -2).T @ head_input.flatten(0, -2)


def _attach_grad(value: Tensor, variable: Tensor, grad: Tensor | None) -> Tensor:
    """Return `value` with the gradient `grad` for `variable`, by adding a zero that has it."""
    if grad is None or not variable.requires_grad:
        return value
    carrier = (variable * grad).sum()
    return value + (carrier - carrier.detach())
