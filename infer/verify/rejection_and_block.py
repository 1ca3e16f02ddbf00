"""Rules that test the ratio of the target's and the draft's probabilities of each token.

`rejection`: recursive rejection sampling. The children of a node are tested in the order of sampling, each accepted
with probability target / draft; a rejection leaves residuals of both. Leviathan et al., arXiv 2211.17192; trees as in
EAGLE, arXiv 2401.15077, and Sequoia, 2402.12374.

`block`: verify a sampled chain jointly. Sun et al., ICLR 2025, arXiv 2403.10444. For drafted tokens x_1 .. x_N:

    p_0 = 1;  p_i = min(1, p_{i-1} * target(x_i) / draft(x_i))     acceptable share of x_1 .. x_i
    s_i = sum_x max(p_i * target(x) - draft(x), 0)                 residual mass after x_i, i < N
    h_i = s_i / (s_i + 1 - p_i) for i < N;  h_N = p_N              probability of ending at x_i

The path ends at the last node whose uniform number is below h; the next token is sampled from the terms of s.

Axes: B rows, N root and nodes (of a chain without them: x_1 .. x_N), V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from infer.verify.base import AcceptanceRule, AcceptedPath, ScoredNodes, build_accepted_path
from infer.verify.config import Verification
from models.io.errors import require
from models.trees.growth import Proposal
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree, TreeKind


def compute_residual(
    target: Float[Tensor, "batch vocab"], draft: Float[Tensor, "batch vocab"], token: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch vocab"], Float[Tensor, "batch vocab"]]:
    """Return the acceptance probability of a child, and the residuals of target and draft if it is rejected.

    They follow from the residuals that its earlier siblings left.
    `target` sums to 1. `draft` need not; it is one-hot if the token was not sampled.

    >>> target, draft = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    >>> compute_residual(target, draft, torch.tensor([2]))  # target probability 0
    (tensor([0.]), tensor([[1., 0., 0.]]), tensor([[0.2500, 0.5000, 0.0000]]))
    """
    index = token[:, None]
    draft_probs = _normalize(draft)
    draft_prob = draft_probs.gather(1, index)
    possible = draft_prob > 0  # False if no mass was left to sample from: the token is arbitrary
    accept_prob = torch.where(possible, target.gather(1, index) / draft_prob, 0.0).clamp_max(1.0)
    remaining = (target - draft_probs).clamp_min(0.0)
    # If target and draft are equal, rejection is impossible: any residual will do.
    is_valid = possible & (remaining.sum(-1, keepdim=True) > 0)
    rejected = torch.where(is_valid, _normalize(remaining), target)
    return accept_prob[:, 0], rejected, draft.scatter(1, index, 0.0)


def _normalize(weights: Tensor) -> Tensor:
    """Return weights scaled to sum 1; rows of zeros stay unchanged."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


@dataclass(frozen=True)
class RejectionRule(AcceptanceRule):
    """Recursive rejection sampling, with one uniform number per node.

    The residual must be sampled with noise that the children were not sampled with.
    """

    verification = Verification.rejection

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        super().check(sampling, tree)
        if tree is None or not self.needs_drawn_tokens(tree):
            return
        for level in tree.levels:
            for parent in {parent for parent, _ in level}:
                ranks = sorted(rank for above, rank in level if above == parent)
                require(
                    ranks == list(range(len(ranks))),
                    f"evaluation.verification: {self.name} needs every draw of a node, from the first on, got "
                    f"tree.paths with siblings of ranks {ranks}; add the missing ones or take coupled",
                )

    def accept(self, proposal: Proposal, scored: ScoredNodes, depth: int) -> AcceptedPath:
        """Test the nodes in index order: parents before children, siblings in order of sampling.

        `node` is the last accepted node of each row (0 is the root); `target_residual` and
        `draft_residual` are the distributions that remain there after the rejected children.
        """
        uniforms = scored.uniforms
        assert uniforms is not None
        target_BNV = scored.warped_logits.softmax(-1)
        draft_BNV = proposal.child_log_probs.exp() if proposal.child_log_probs is not None else None
        target_residual = target_BNV[:, 0]
        draft_residual = draft_BNV[:, 0] if draft_BNV is not None else target_residual
        node = torch.zeros_like(target_residual[:, 0], dtype=torch.int64)
        for child, token in enumerate(proposal.ids.unbind(1)):
            if draft_BNV is None:  # the tree is deterministic
                draft_residual = one_hot(token, target_residual.shape[-1]).to(target_residual.dtype)
            accept_prob, target_left, draft_left = compute_residual(target_residual, draft_residual, token)
            is_child = (proposal.parents[:, child] + 1 == node)[:, None]
            accepted = is_child & (uniforms[:, child] < accept_prob)[:, None]
            node = torch.where(accepted[:, 0], child + 1, node)
            target_residual = torch.where(is_child, target_left, target_residual)
            target_residual = torch.where(accepted, target_BNV[:, child + 1], target_residual)
            if draft_BNV is not None:
                draft_residual = torch.where(is_child, draft_left, draft_residual)
                draft_residual = torch.where(accepted, draft_BNV[:, child + 1], draft_residual)
        return build_accepted_path(proposal, node, scored.sample_token(target_residual, node), depth)


def compute_block_residual(
    target: Float[Tensor, "batch verified vocab"],
    draft: Float[Tensor, "batch nodes vocab"],
    ids: Int[Tensor, "batch nodes"],
) -> tuple[Float[Tensor, "batch nodes"], Float[Tensor, "batch verified vocab"]]:
    """Return the probability that the path ends at each node, and the residuals of the target.

    The probability of a node is conditional on the path ending at no later node. Residuals are not
    normalized. `draft` sums to 1; it is one-hot if a token was not sampled.
    """
    before = target[:, :-1]
    target_prob, draft_prob = (probs.gather(2, ids[:, :, None])[..., 0] for probs in (before, draft))
    ratio = torch.where(draft_prob > 0, target_prob / draft_prob, 0.0)
    ratio = ratio.clamp_max(torch.finfo(ratio.dtype).max)  # 0 times infinity would be NaN
    acceptable = [torch.ones_like(target[:, 0, 0])]
    for node_ratio in ratio.unbind(1):
        acceptable.append((acceptable[-1] * node_ratio).clamp_max(1.0))
    acceptable = torch.stack(acceptable, 1)
    residual = (acceptable[:, :-1, None] * before - draft).clamp_min(0.0)
    mass = residual.sum(-1)
    # If target and draft are equal, no mass is left and no path ends: any distribution will do.
    middle = torch.where(mass > 0, mass / (mass + (1 - acceptable[:, :-1])), 0.0)
    end_prob = torch.cat([middle, acceptable[:, -1:]], 1)[:, 1:]
    residual = torch.where(mass[..., None] > 0, residual, before)
    return end_prob, torch.cat([residual, target[:, -1:]], 1)


@dataclass(frozen=True)
class BlockRule(AcceptanceRule):
    """Block verification, with one uniform number per node.

    The residual must be sampled with noise that the chain was not sampled with.
    """

    verification = Verification.block

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        if tree is not None:
            require(
                tree.kind is TreeKind.chain and not tree.ngram_tokens,
                f"evaluation.verification: {self.name} needs a chain without copied tokens, got "
                f"tree.kind={tree.kind.value}, tree.ngram_tokens={tree.ngram_tokens}; take rejection or coupled",
            )
        super().check(sampling, tree)

    def accept(self, proposal: Proposal, scored: ScoredNodes, depth: int) -> AcceptedPath:
        uniforms = scored.uniforms
        assert uniforms is not None
        target = scored.warped_logits.softmax(-1)
        if proposal.child_log_probs is None:  # the chain is deterministic
            draft = one_hot(proposal.ids, target.shape[-1]).to(target.dtype)
        else:
            draft = proposal.child_log_probs[:, :-1].exp()
        end_prob, residual = compute_block_residual(target, draft, proposal.ids)
        # The path ends at the last node that passes, or at the root, which is node 0.
        node_index = torch.arange(1, end_prob.shape[1] + 1, device=end_prob.device)
        node = pad(torch.where(uniforms < end_prob, node_index, 0), (1, 0)).amax(1)
        index = node[:, None, None].expand(-1, 1, residual.shape[-1])
        next_token = scored.sample_token(residual.gather(1, index)[:, 0], node)
        return build_accepted_path(proposal, node, next_token, depth)
