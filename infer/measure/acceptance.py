"""Acceptance by depth and rank: how often each candidate of a draft is the target's own token.

Counted with a comb, at each depth the likeliest `ranks` children of the likeliest path. Behind a
less likely sibling acceptance is taken to be as behind the likeliest one, as in Medusa's own search
(arXiv 2401.10774, section 3.1).

Axes: B rows, D depth, R ranks.
"""

import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from models.speculate.tree import Proposal, Tree, TreeKind


def comb(depth: int, ranks: int) -> list[list[int]]:
    """All candidates along the likeliest path.

    >>> comb(2, 3)
    [[0], [1], [2], [0, 0], [0, 1], [0, 2]]
    """
    return [[0] * above + [rank] for above in range(depth) for rank in range(ranks)]


class Tally:
    """Watches a comb being decoded and counts which of its candidates the target wanted."""

    def __init__(self, depth: int, ranks: int):
        self.depth, self.ranks = depth, ranks
        self.rounds, self.hits = torch.zeros(depth), torch.zeros(depth, ranks)

    def __call__(
        self, proposal: Proposal, emitted: Int[Tensor, "batch path"], count: Int[Tensor, " batch"]
    ) -> None:
        children_BDR = proposal.ids.unflatten(1, (self.depth, self.ranks))
        hits_BDR = children_BDR == emitted[:, : self.depth, None]
        # where all before were the likeliest, `emitted` is what the target said on this path
        before_BD = torch.cat([(count > 0)[:, None], hits_BDR[:, :-1, 0]], 1).cumprod(1).bool()
        self.rounds += before_BD.sum(0).cpu()
        self.hits += (hits_BDR & before_BD[:, :, None]).sum(0).cpu()

    def acceptance(self) -> Float[ndarray, "depth ranks"]:
        """Shares; 0 where no round came so deep."""
        return (self.hits / self.rounds.clamp_min(1)[:, None]).double().numpy()


def expected_length(acceptance: Float[ndarray, "depth ranks"], shape: Tree) -> float | None:
    """Tokens a round that the table promises; None of a tree that it does not cover."""
    depth, ranks = acceptance.shape
    covered = shape.kind is not TreeKind.dynamic and not shape.copied and shape.depth <= depth
    if not covered or any(rank >= ranks for level in shape.levels for _, rank in level):
        return None
    total, above = 1.0, [1.0]
    for shares, level in zip(acceptance, shape.levels, strict=False):
        above = [above[parent] * float(shares[rank]) for parent, rank in level]
        total += sum(above)
    return total
