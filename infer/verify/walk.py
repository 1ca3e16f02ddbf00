"""`greedy` and `coupled`: accept the path that the target would take without a draft.

The target chooses one token after every node: the likeliest (greedy), or the one that its keyed
noise selects (coupled, inference by sample-and-walk: Rowan et al., arXiv 2506.05632). Walking from
the root along these choices emits exactly what decoding one token at a time would emit, for any
tree and any draft.

Axes: B rows, N nodes, D deepest node.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from infer.verify.base import AcceptanceRule, AcceptedPath, ScoredTree
from models.speculate.tree import Proposal


def walk_choices(
    proposal: Proposal, choice: Int[Tensor, "batch verified"], depth: int
) -> AcceptedPath:
    """Follow the target's choices from the root as far as the tree contains them.

    >>> tree = Proposal(ids=torch.tensor([[7, 8, 9]]), parents=torch.tensor([[-1, -1, 1]]))
    >>> walk_choices(tree, torch.tensor([[8, 0, 9, 5]]), depth=2)  # 8 at the root, then 9, then 5
    AcceptedPath(ids=tensor([[8, 9, 5]]), nodes=tensor([[0, 2, 3]]), count=tensor([3]))
    """
    node = torch.zeros_like(choice[:, 0])
    on_path = torch.ones_like(node, dtype=torch.bool)
    count = torch.ones_like(node)
    nodes, ids = [node], []
    for _ in range(depth):
        next_id = choice.gather(1, node[:, None])
        ids.append(next_id[:, 0])
        # argmax takes the first of equal siblings: only it may have children, see
        # models/drafts/mixed.py
        matches = (proposal.parents + 1 == node[:, None]) & (proposal.ids == next_id)
        on_path = on_path & matches.any(1)
        node = torch.where(on_path, matches.int().argmax(1) + 1, node)
        count = count + on_path
        nodes.append(node)
    ids.append(choice.gather(1, node[:, None])[:, 0])
    return AcceptedPath(ids=torch.stack(ids, 1), nodes=torch.stack(nodes, 1), count=count)


@dataclass(frozen=True)
class GreedyRule(AcceptanceRule):
    """Acceptance of the target's likeliest tokens."""

    name = "greedy"
    greedy = True

    def accept(self, scored: ScoredTree, depth: int) -> AcceptedPath:
        return walk_choices(scored.proposal, scored.choice, depth)


@dataclass(frozen=True)
class CoupledRule(AcceptanceRule):
    """Acceptance of the tokens that the noise keyed by (row, position) selects from the target.

    The draft may use the same noise, and then proposes these tokens more often.
    """

    name = "coupled"

    def accept(self, scored: ScoredTree, depth: int) -> AcceptedPath:
        return walk_choices(scored.proposal, scored.choice, depth)
