"""The distillation loss of many tokens, computed in chunks together with its gradient.

`chunked_distillation_loss` applies the output heads and never holds [tokens, vocab] for more than
one chunk. `token_losses` defines the losses, `config` their options. Compiled, all chunks have one shape, so that
`evaluate_chunk` is compiled once, however many chunks a batch has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from models.device.memory_trace import map_chunks
from models.losses.config import LossConf, LossName
from models.losses.distributions import (
    TargetDistribution,
    TopKLogits,
    target_distribution,
    target_distribution_from_topk,
)
from models.losses.heads import Heads, SplitHeads, allocate_grads, build_heads
from models.losses.token_losses import score_with_grad

TargetHead = Float[Tensor, "vocab width"] | Callable[[Tensor], Tensor]
Metrics = dict[str, Float[Tensor, "*steps 2"]]  # name -> (sum, count) of each step
# Draft hidden states, target hidden states or top-k logits, weights, labels.
Chunk = tuple[Tensor, Tensor | TopKLogits, Tensor, Tensor | None]
ChunkEvaluator = Callable[["ChunkSettings", Chunk], tuple[Float[Tensor, ""], Metrics, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """The heads and options that all chunks of a loss read."""

    draft_heads: Heads
    target_head: TargetHead
    kept_ids: Tensor | None
    conf: LossConf


def evaluate_chunk(settings: ChunkSettings, chunk: Chunk) -> tuple[Float[Tensor, ""], Metrics, Tensor]:
    """Return the loss of a chunk, its metrics and its gradient for the draft's hidden states.

    The gradients of the heads are added to those that `settings.draft_heads` holds, in place.
    """
    hidden, target_hidden_or_topk, weight, labels = chunk
    heads, kept_ids, conf = settings.draft_heads, settings.kept_ids, settings.conf
    target = build_target_distribution(settings.target_head, target_hidden_or_topk, labels, kept_ids, conf)
    logits, inputs = heads.compute_logits(hidden)
    scores, grad = score_with_grad(logits, target, kept_ids, conf, weight)
    hidden_grad = heads.backpropagate(grad.to(hidden.dtype), inputs)
    return (scores["loss"] * weight).sum(), sum_metrics(scores, weight), hidden_grad


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
    evaluate: ChunkEvaluator = evaluate_chunk,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Return the sum of the weighted losses, and the metrics of the tokens whose weight is not 0.

    Token t of every step is compared with the target's distribution t, which all steps share. The
    step axis is optional. The gradients of a chunk are computed along with its logits.
    `target_hidden_or_topk`: hidden states for the target's head, or the likeliest tokens.
    `draft_heads` [draft_vocab, draft_width]: one for all steps, or one for each of them; whole, or DTensors of rows.
    `labels`: the text's token (a target id) that the target's distribution t predicts.
    `evaluate`: `evaluate_chunk` or what a compiler made of it.
    """
    head_grads = allocate_grads(draft_heads)
    heads = build_heads(draft_heads, head_grads)
    joins_ranks = isinstance(heads, SplitHeads) or getattr(target_head, "joins_ranks", False)
    if weight.device.type == "cpu" and not joins_ranks:
        # Prompts and padding weigh 0. On other devices dropping them would make the device wait for
        # the host; ranks that join their heads need as many chunks as the others.
        counted = weight.reshape(-1, weight.shape[-1]).any(0).nonzero()[:, 0]
        draft_hidden = draft_hidden.index_select(-2, counted)
        target_hidden_or_topk = _map_tensors(target_hidden_or_topk, lambda t: t[counted])
        weight = weight.index_select(-1, counted)
        labels = None if labels is None else labels[counted]
    # `conf.logits_chunk` counts the drafted tokens of all steps, which share the target's.
    chunk_size = max(1, conf.logits_chunk // draft_hidden.shape[:-2].numel())
    settings = ChunkSettings(draft_heads=heads, target_head=target_head, kept_ids=kept_ids, conf=conf)
    hidden, hidden_grad = draft_hidden.detach(), torch.empty_like(draft_hidden)

    def compute_chunk(start: int) -> tuple[Tensor, Metrics]:
        # Graphs take chunks of one size; without them, the last chunk is as short as it is.
        size = chunk_size if evaluate is not evaluate_chunk else max(1, min(chunk_size, num_tokens - start))
        chunk = (
            _take_tokens(hidden, -2, start, size),
            _map_tensors(target_hidden_or_topk, lambda t: _take_tokens(t, 0, start, size)),
            _take_tokens(weight, -1, start, size),
            None if labels is None else _take_tokens(labels, 0, start, size),
        )
        loss, sums, grad = evaluate(settings, chunk)
        own = hidden_grad.narrow(-2, start, min(chunk_size, num_tokens - start))
        own.copy_(grad.narrow(-2, 0, own.shape[-2]))
        return loss, sums

    num_tokens = weight.shape[-1]
    with torch.no_grad():
        starts = range(0, max(num_tokens, 1), chunk_size)  # a chunk at least, which gives the metrics' names
        losses, sums = zip(*map_chunks(compute_chunk, starts), strict=True)
        metrics = {name: torch.stack([s[name] for s in sums]).sum(0) for name in sums[0]}
        heads.finish_grads()
    pairs = [(draft_hidden, hidden_grad), *zip(draft_heads, head_grads, strict=True)]
    learned = [(variable, grad) for variable, grad in pairs if variable.requires_grad and grad is not None]
    total: Tensor = _GivenGradients.apply(torch.stack(losses).sum(), *chain(*learned))
    return total, metrics


def build_target_distribution(
    head: TargetHead,
    target_hidden_or_topk: Tensor | TopKLogits,
    labels: Tensor | None,
    kept_ids: Tensor | None,
    conf: LossConf,
) -> TargetDistribution:
    """Return the target's distribution, from hidden states and its head or from top-k logits.

    `labels` are used only by `loss.name=ce`.
    """
    labels = labels if conf.name is LossName.ce else None
    if isinstance(target_hidden_or_topk, TopKLogits):
        assert conf.temperature == 1, "loss.temperature: must be 1 for top-k logits"
        return target_distribution_from_topk(target_hidden_or_topk, labels=labels, kept_ids=kept_ids)
    apply_head = partial(linear, weight=head) if isinstance(head, Tensor) else head
    return target_distribution(
        apply_head(target_hidden_or_topk).detach(), labels=labels, kept_ids=kept_ids, temperature=conf.temperature
    )


def sum_metrics(scores: dict[str, Tensor], weight: Float[Tensor, "*steps tokens"]) -> Metrics:
    """Return each score's unweighted (sum, count) over the tokens that count: [*steps, 2]."""
    is_counted = weight != 0
    count = is_counted.sum(-1).float()
    return {name: torch.stack([score.float().mul(is_counted).sum(-1), count], -1) for name, score in scores.items()}


def _map_tensors(hidden_or_topk: Tensor | TopKLogits, change: Callable[[Tensor], Tensor]) -> Tensor | TopKLogits:
    if isinstance(hidden_or_topk, TopKLogits):
        return hidden_or_topk.map_tensors(change)
    return change(hidden_or_topk)


def _take_tokens(values: Tensor, axis: int, start: int, size: int) -> Tensor:
    """Return `size` tokens from `start` on, and 0 for those past the last.

    All results have one shape and are contiguous, so that chunks share a graph.
    """
    part = values.narrow(axis, start, min(size, values.shape[axis] - start))
    missing = size - part.shape[axis]
    if not missing:
        return part.contiguous()
    shape = list(part.shape)
    shape[axis] = missing
    return torch.cat([part, part.new_zeros(shape)], axis)


class _GivenGradients(torch.autograd.Function):
    """A value whose gradients are known: takes the value, then each variable and its gradient in turn."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *variables_and_grads: Tensor) -> Tensor:
        ctx.dtypes = [variable.dtype for variable in variables_and_grads[::2]]
        ctx.save_for_backward(*variables_and_grads[1::2])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (grads[0] * grad.to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return None, *chain.from_iterable((grad, None) for grad in scaled)
