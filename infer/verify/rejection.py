"""`rejection`: recursive rejection sampling, the children of a node sampled without replacement.

The children are tested in the order of sampling, each accepted with probability target / draft of
its token. A rejection leaves residuals: of the target max(target - draft, 0), of the draft all but
the rejected token. After the last rejected child the token is sampled from the target's residual.
Leviathan et al., arXiv 2211.17192; trees as in EAGLE, arXiv 2401.15077, and Sequoia, 2402.12374.

Axes: B rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from infer.verify.base import AcceptanceRule, AcceptedPath, ScoredTree, build_accepted_path
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Tree


class Residual(NamedTuple):
    """The acceptance probability of a child, and the residual distributions if it is rejected."""

    accept_prob: Float[Tensor, " batch"]
    target: Float[Tensor, "batch vocab"]
    draft: Float[Tensor, "batch vocab"]


def compute_residual(
    target: Float[Tensor, "batch vocab"], draft: Float[Tensor, "batch vocab"],
    token: Int[Tensor, " batch"],
) -> Residual:  # fmt: skip
    """Compute the residual of one child from the residuals that its earlier siblings left.

    `target` sums to 1. `draft` need not; it is one-hot where the token was not sampled.

    >>> target, draft = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    >>> residual = compute_residual(target, draft, torch.tensor([2]))  # target probability 0
    >>> residual.accept_prob, residual.target, residual.draft
    (tensor([0.]), tensor([[1., 0., 0.]]), tensor([[0.2500, 0.5000, 0.0000]]))
    """
    index = token[:, None]
    draft_probs = _normalize(draft)
    draft_prob = draft_probs.gather(1, index)
    possible = draft_prob > 0  # False where no mass was left to sample from: an arbitrary token
    accept_prob = torch.where(possible, target.gather(1, index) / draft_prob, 0.0).clamp_max(1.0)
    remaining = (target - draft_probs).clamp_min(0.0)
    # where target and draft are equal, rejection is impossible: any residual will do
    is_valid = possible & (remaining.sum(-1, keepdim=True) > 0)
    return Residual(
        accept_prob=accept_prob[:, 0],
        target=torch.where(is_valid, _normalize(remaining), target),
        draft=draft.scatter(1, index, 0.0),
    )


def _normalize(weights: Tensor) -> Tensor:
    """Scale weights to sum 1; rows of zeros stay unchanged."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


@dataclass(frozen=True)
class RejectionRule(AcceptanceRule):
    """Recursive rejection sampling, with one uniform number for each node.

    The residual must be sampled with other noise than the children.
    """

    name = "rejection"
    is_ratio_test = True

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        super().check(sampling, tree)
        if tree is None or not self.needs_drawn_tokens(tree):
            return
        for level in tree.levels:
            for parent in {parent for parent, _ in level}:
                ranks = sorted(rank for above, rank in level if above == parent)
                if ranks != list(range(len(ranks))):
                    raise UserError(
                        f"evaluation.verification: {self.name} needs every draw of a node, from "
                        f"the first on, got tree.paths with siblings of ranks {ranks}; add the "
                        "missing ones or take coupled"
                    )

    def accept(self, scored: ScoredTree, depth: int) -> AcceptedPath:
        """Test the nodes in index order: parents before children, siblings in order of sampling.

        `node` is the last accepted node of each row (0 is the root); `target_residual` and
        `draft_residual` are the distributions that remain there after the rejected children.
        """
        proposal, uniforms = scored.proposal, scored.uniforms
        assert uniforms is not None
        target_BNV = scored.warped_logits.softmax(-1)
        draft_BNV = proposal.child_log_probs.exp() if proposal.child_log_probs is not None else None
        target_residual = target_BNV[:, 0]
        draft_residual = draft_BNV[:, 0] if draft_BNV is not None else target_residual
        node = torch.zeros_like(target_residual[:, 0], dtype=torch.int64)
        for child, token in enumerate(proposal.ids.unbind(1)):
            if draft_BNV is None:  # the tree is deterministic
                draft_residual = one_hot(token, target_residual.shape[-1]).to(target_residual.dtype)
            residual = compute_residual(target_residual, draft_residual, token)
            is_child = (proposal.parents[:, child] + 1 == node)[:, None]
            accepted = is_child & (uniforms[:, child] < residual.accept_prob)[:, None]
            node = torch.where(accepted[:, 0], child + 1, node)
            target_residual = torch.where(is_child, residual.target, target_residual)
            target_residual = torch.where(accepted, target_BNV[:, child + 1], target_residual)
            if draft_BNV is not None:
                draft_residual = torch.where(is_child, residual.draft, draft_residual)
                draft_residual = torch.where(accepted, draft_BNV[:, child + 1], draft_residual)
        return build_accepted_path(
            proposal, node, scored.sample_token(target_residual, node), depth
        )
