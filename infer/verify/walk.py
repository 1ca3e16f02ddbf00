"""`greedy` and `coupled`: accept the path that the target itself would have taken.

The target chooses one token behind every node: its likeliest one (greedy), or the one that its own
keyed noise picks (coupled, inference by sample-and-walk: Rowan et al., arXiv 2506.05632). Walking
from the root along these choices emits exactly what decoding one token at a time would emit, for
any tree and any draft.

Axes: B rows, N nodes, D deepest node.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from infer.verify.base import Accepted, Scored, Verifier
from models.speculate.tree import Proposal


def walk(proposal: Proposal, choice: Int[Tensor, "batch verified"], depth: int) -> Accepted:
    """Follow the target's choices from the root, as far as the tree holds them.

    >>> tree = Proposal(ids=torch.tensor([[7, 8, 9]]), parents=torch.tensor([[-1, -1, 1]]))
    >>> walk(tree, torch.tensor([[8, 0, 9, 5]]), depth=2)  # root wants 8, that node 9, that one 5
    Accepted(ids=tensor([[8, 9, 5]]), nodes=tensor([[0, 2, 3]]), count=tensor([3]))
    """
    node = torch.zeros_like(choice[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    count = torch.ones_like(node)
    nodes, ids = [node], []
    for _ in range(depth):
        wanted = choice.gather(1, node[:, None])
        ids.append(wanted[:, 0])
        # of equal siblings the first: it alone may have children (models/drafts/mixed.py)
        fits = (proposal.parents + 1 == node[:, None]) & (proposal.ids == wanted)
        alive = alive & fits.any(1)
        node = torch.where(alive, fits.int().argmax(1) + 1, node)
        count = count + alive
        nodes.append(node)
    ids.append(choice.gather(1, node[:, None])[:, 0])
    return Accepted(ids=torch.stack(ids, 1), nodes=torch.stack(nodes, 1), count=count)


@dataclass(frozen=True)
class Greedy(Verifier):
    """The target's likeliest tokens."""

    name = "greedy"
    greedy = True

    def accept(self, scored: Scored, depth: int) -> Accepted:
        return walk(scored.proposal, scored.choice, depth)


@dataclass(frozen=True)
class Coupled(Verifier):
    """The tokens that the noise of (row, position) picks, whether or not they were proposed.

    The draft may use the same noise, and then proposes them more often.
    """

    name = "coupled"

    def accept(self, scored: Scored, depth: int) -> Accepted:
        return walk(scored.proposal, scored.choice, depth)
