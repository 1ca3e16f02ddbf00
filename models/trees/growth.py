"""The growth of token trees, which the target scores in one pass.

A tree grows level by level from the root, the last known token, into the shape of a `Tree`.

A node's number does not count the root, which is -1 as a parent. In passes that verify the root comes
first: there a node's index is its number + 1, the root's 0, and the axis is named "verified".

Axes: B rows, N nodes (root not counted), W nodes expanded at once, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.operators import DROPPED_SCORE, gather_mask, stable_topk, topk_rows
from models.trees.sampling import Sampler
from models.trees.tree import Tree, TreeKind

# tokens [B, W] (target ids), the index of each one's parent among those of the call before [B, W]
# (at first 0, the root), and their depth
# -> raw logits [B, W, draft_vocab], or [B, 1, draft_vocab] if all W have the same
ExpandFn = Callable[[Tensor, Tensor, int], Tensor]


def ancestor_mask(parents_BN: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch verified verified"]:
    """Return the nodes that each node attends to: itself and its ancestors, the root first.

    >>> ancestor_mask(torch.tensor([[-1, -1, 0]])).int()[0]  # root, two children, one grandchild
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    batch, nodes = parents_BN.shape
    eye = torch.eye(nodes + 1, dtype=torch.bool, device=parents_BN.device)
    ancestors = eye.expand(batch, -1, -1)
    # The root is its own parent.
    jump = torch.cat([torch.zeros_like(parents_BN[:, :1]), parents_BN + 1], 1)
    for _ in range(nodes.bit_length()):  # pointer doubling: the reach, 1 at first, doubles
        ancestors = ancestors | gather_mask(ancestors, 1, jump[:, :, None].expand_as(ancestors))
        jump = jump.gather(1, jump)
    return ancestors


def node_depths(ancestors: Bool[Tensor, "batch verified verified"]) -> Int[Tensor, "batch verified"]:
    """Return the depth of each node from its ancestors, the root having depth 0."""
    return ancestors.sum(-1) - 1


@dataclass(kw_only=True)
class Proposal:
    """One token tree per row: node i is a child of node `parents[i]`; -1 is the root.

    `child_log_probs`: the log-probabilities from which the children of the root and of each node were drawn, without
    replacement and in their order; entries of leaves are not used. It is None if the tree was not drawn.
    """

    ids: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]  # parents[i] < i
    child_log_probs: Float[Tensor, "batch verified vocab"] | None = field(default=None, repr=False)


def grow(
    tree: Tree,
    sampler: Sampler,
    first: Float[Tensor, "batch draft_vocab"],
    expand: ExpandFn,
    *,
    kept_ids: Int[Tensor, " draft_vocab"] | None = None,
    vocab_size: int | None = None,
) -> Proposal:
    """Return a proposal of the shape of `tree`, grown from the root's raw logits `first`.

    `kept_ids` are the target ids of a reduced draft vocabulary, and `vocab_size` is the size of the target's.
    """
    grow_kind = _grow_dynamic if tree.kind is TreeKind.dynamic else _grow_static
    return grow_kind(tree, _CandidateScorer(sampler, kept_ids, vocab_size or first.shape[-1]), first[:, None], expand)


class _CandidateScorer:
    """A sampler of a draft's candidates, with tokens as target ids."""

    def __init__(self, sampler: Sampler, kept_ids: Tensor | None, vocab: int):
        self.sampler, self.kept_ids, self.vocab = sampler, kept_ids, vocab

    def target_ids(self, tokens: Tensor) -> Tensor:
        return tokens if self.kept_ids is None else self.kept_ids[tokens]

    def target_log_probs(self, warped: Tensor) -> Tensor:
        """Return log-probabilities over the target's vocabulary [B, W, V]."""
        log_probs = warped.log_softmax(-1)
        if self.kept_ids is None:
            return log_probs
        full = log_probs.new_full((*log_probs.shape[:2], self.vocab), DROPPED_SCORE)
        return full.index_copy(2, self.kept_ids, log_probs)


def _grow_static(tree: Tree, scorer: _CandidateScorer, logits: Tensor, expand: ExpandFn) -> Proposal:
    expanded = [0]  # indices in the level above of the nodes whose children are drafted
    ids, parents = [], []
    offset = -1  # number of the first node of the level above; -1 is the root
    drawn_from: dict[int, Tensor] = {}  # by the number of the parent
    for level, nodes in enumerate(tree.levels):
        ranks = max(rank for _, rank in nodes) + 1
        warped, scores = scorer.sampler.score_candidates(logits, level, scorer.kept_ids)
        top = topk_rows(scores, ranks)[1].expand(-1, len(expanded), -1)
        if scorer.sampler.draws:
            log_probs = scorer.target_log_probs(warped).expand(-1, len(expanded), -1)
            drawn_from |= {offset + p: log_probs[:, i] for i, p in enumerate(expanded)}
        tokens = scorer.target_ids(torch.stack([top[:, expanded.index(p), rank] for p, rank in nodes], 1))
        ids.append(tokens)
        parents += [p + offset if level else -1 for p, _ in nodes]
        offset = len(parents) - len(nodes)
        if level + 1 < tree.depth:
            previous, expanded = expanded, sorted({p for p, _ in tree.levels[level + 1]})
            parent_index = [previous.index(nodes[i][0]) for i in expanded]
            parent_index_W = _make_constant(parent_index, tokens.device)
            chosen = torch.stack([tokens[:, i] for i in expanded], 1)
            logits = expand(chosen, parent_index_W.expand(len(tokens), -1), level + 1)
    child_log_probs = None
    if scorer.sampler.draws:
        leaf = torch.full_like(drawn_from[-1], DROPPED_SCORE)
        child_log_probs = torch.stack([drawn_from.get(i, leaf) for i in range(-1, len(parents))], 1)
    return Proposal(
        ids=torch.cat(ids, 1),
        parents=_make_constant(parents, logits.device).repeat(len(logits), 1),
        child_log_probs=child_log_probs,
    )


def _make_constant(numbers: list[int], device: torch.device) -> Int[Tensor, " numbers"]:
    """Return numbers as a tensor without a copy from the host, which a recorded round cannot hold."""
    return torch.cat([torch.full((1,), number, device=device) for number in numbers])


def _grow_dynamic(tree: Tree, scorer: _CandidateScorer, logits: Tensor, expand: ExpandFn) -> Proposal:
    """Keep the nodes whose paths have the highest score, the sum of the logarithms of their tokens' softmax.

    Under coupled sampling the logits have the target's noise, so that what the target will choose is kept.
    """

    def rank_children(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        _, scores = scorer.sampler.score_candidates(logits, level, scorer.kept_ids)
        # Values above 0, which rounding may cause, would let a child outrank its parent.
        log_scores = scores.float().log_softmax(-1).clamp_max(0.0)
        score, token = topk_rows(log_scores, tree.children)
        return score, scorer.target_ids(token)

    score, token = (part[:, 0] for part in rank_children(logits, 0))
    pool = [(score, token, torch.full_like(token, -1))]  # the candidates of each level
    size = 0  # candidates before this level
    parent_index = torch.zeros_like(token)
    for level in range(1, tree.depth):
        width = min(tree.beam_width, token.shape[1])
        beam_score, beam = stable_topk(score, width)
        logits = expand(token.gather(1, beam), parent_index.gather(1, beam), level)
        child_score, child = (part.expand(-1, width, -1) for part in rank_children(logits, level))
        # index of the parent among all candidates
        parent = (beam + size)[:, :, None].expand_as(child).flatten(1)
        size += token.shape[1]
        score, token = (beam_score[:, :, None] + child_score).flatten(1), child.flatten(1)
        beam_index = torch.arange(width, device=token.device)[None, :, None]
        parent_index = beam_index.expand_as(child).flatten(1)
        pool.append((score, token, parent))
    all_scores, candidates, parents = (torch.cat(parts, 1) for parts in zip(*pool, strict=True))
    # Parents come before their children and score no less, so a tree that is cut by this order is
    # prefix-closed and lists parents first, even with ties.
    _, best = stable_topk(all_scores, tree.nodes)
    node_index = torch.arange(tree.nodes, device=best.device).expand_as(best)
    # the node of each candidate in the tree, or -1 if it was not chosen
    node_of = torch.full_like(candidates, -1).scatter(1, best, node_index)
    best_parent = parents.gather(1, best)
    return Proposal(
        ids=candidates.gather(1, best),
        parents=torch.where(best_parent < 0, -1, node_of.gather(1, best_parent.clamp_min(0))),
    )
