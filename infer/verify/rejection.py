"""`rejection`: recursive rejection sampling, the children of a node drawn without replacement.

Each child in draw order is accepted with the chance target / draft of its token. One that is
rejected leaves less of both: of the target what the draft did not cover, of the draft what it has
not drawn yet. Behind the last rejected child the token comes from what is left of the target.
Leviathan et al., arXiv 2211.17192; trees as in EAGLE, arXiv 2401.15077, and Sequoia, 2402.12374.

Axes: B rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from infer.verify.base import Accepted, Scored, Verifier, ending_at
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Tree


class Weighed(NamedTuple):
    """One child's chance, and what its rejection leaves of the target and of the draft."""

    odds: Float[Tensor, " batch"]
    target: Float[Tensor, "batch vocab"]
    draft: Float[Tensor, "batch vocab"]


def weigh(
    target: Float[Tensor, "batch vocab"], draft: Float[Tensor, "batch vocab"],
    token: Int[Tensor, " batch"],
) -> Weighed:  # fmt: skip
    """Judge one child by what its elder siblings left of target and draft.

    `target` sums to 1. `draft` need not; of a token that was not drawn it is one-hot.

    >>> target, draft = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    >>> weighed = weigh(target, draft, torch.tensor([2]))  # the target would never have said 2
    >>> weighed.odds, weighed.target, weighed.draft
    (tensor([0.]), tensor([[1., 0., 0.]]), tensor([[0.2500, 0.5000, 0.0000]]))
    """
    place = token[:, None]
    drawn = _normed(draft)
    chance = drawn.gather(1, place)
    possible = chance > 0  # else nothing was left to draw: the token stands there for no reason
    odds = torch.where(possible, target.gather(1, place) / chance, 0.0).clamp_max(1.0)
    left = (target - drawn).clamp_min(0.0)
    # where target and draft are equal, rejection has no chance and leaves nothing: any answer does
    some = possible & (left.sum(-1, keepdim=True) > 0)
    return Weighed(
        odds=odds[:, 0],
        target=torch.where(some, _normed(left), target),
        draft=draft.scatter(1, place, 0.0),
    )


def _normed(weights: Tensor) -> Tensor:
    """To sum 1; all zeros stay as they are."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


@dataclass(frozen=True)
class Rejection(Verifier):
    """One coin a node; the residual's noise must not be what the children were drawn with."""

    name = "rejection"
    ratio = True

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        super().check(sampling, tree)
        if tree is None or not self.draws(tree):
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

    def accept(self, scored: Scored, depth: int) -> Accepted:
        """One pass over the nodes: in index order parents precede children, elder ones younger.

        At each moment `target` and `draft` are what is left behind `node`, where the path stands.
        """
        proposal, coins = scored.proposal, scored.coins
        assert coins is not None
        target_BNV = scored.warped.softmax(-1)
        draft_BNV = proposal.behind.exp() if proposal.behind is not None else None
        target = target_BNV[:, 0]
        draft = draft_BNV[:, 0] if draft_BNV is not None else target
        node = torch.zeros_like(target[:, 0], dtype=torch.int64)
        for child, token in enumerate(proposal.ids.unbind(1)):
            if draft_BNV is None:  # nothing but this token was to come
                draft = one_hot(token, target.shape[-1]).to(target.dtype)
            weighed = weigh(target, draft, token)
            judged = (proposal.parents[:, child] + 1 == node)[:, None]
            taken = judged & (coins[:, child] < weighed.odds)[:, None]
            node = torch.where(taken[:, 0], child + 1, node)
            target = torch.where(judged, weighed.target, target)
            target = torch.where(taken, target_BNV[:, child + 1], target)
            if draft_BNV is not None:
                draft = torch.where(judged, weighed.draft, draft)
                draft = torch.where(taken, draft_BNV[:, child + 1], draft)
        return ending_at(proposal, node, scored.pick(target, node), depth)
