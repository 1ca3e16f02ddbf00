"""Rules that read only the target: the path that it takes itself, or one that it finds likely.

`greedy` and `coupled`: the target chooses one token after every node: the likeliest (greedy), or
the one that its keyed noise selects (coupled, inference by sample-and-walk: Rowan et al., arXiv
2506.05632). Walking from the root along these choices emits exactly what decoding one token at a
time would emit, for any tree and any draft.

`typical`: accept tokens that are likely enough under the target; lossy, with longer paths.

Axes: B rows, N root and nodes.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from infer.verify.base import AcceptanceRule, AcceptedPath, ScoredNodes, build_accepted_path
from infer.verify.config import Verification
from models.trees.growth import Proposal, ancestor_mask, node_depths


def walk_choices(proposal: Proposal, choice: Int[Tensor, "batch verified"], depth: int) -> AcceptedPath:
    """Return the path of the target's choices from the root, as far as the tree contains them.

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
        # argmax takes the first of equal siblings, the only one that may have children: see
        # models/drafts/ngram.py.
        matches = (proposal.parents + 1 == node[:, None]) & (proposal.ids == next_id)
        on_path = on_path & matches.any(1)
        node = torch.where(on_path, matches.float().argmax(1) + 1, node)
        count = count + on_path
        nodes.append(node)
    ids.append(choice.gather(1, node[:, None])[:, 0])
    return AcceptedPath(ids=torch.stack(ids, 1), nodes=torch.stack(nodes, 1), count=count)


@dataclass(frozen=True)
class CoupledRule(AcceptanceRule):
    """Acceptance of the tokens that the noise keyed by (row, position) selects from the target.

    The draft may use the same noise, and then proposes these tokens more often.
    """

    verification = Verification.coupled

    def accept(self, proposal: Proposal, scored: ScoredNodes, depth: int) -> AcceptedPath:
        return walk_choices(proposal, scored.choice, depth)


@dataclass(frozen=True)
class GreedyRule(CoupledRule):
    """Acceptance of the target's likeliest tokens: its choice without noise."""

    verification = Verification.greedy


@dataclass(frozen=True, kw_only=True)
class TypicalRule(AcceptanceRule):
    """Typical acceptance: a token of probability p passes if p >= min(epsilon, delta * exp(-H)).

    H is the entropy of the target's distribution: the threshold is high when the target is certain. The emitted tokens
    do not have the target's distribution. Medusa, arXiv 2401.10774, section 3.3.1.
    """

    verification = Verification.typical

    epsilon: float = 0.09
    delta: float = 0.3

    def typical_nodes(
        self, proposal: Proposal, warped: Float[Tensor, "batch verified vocab"]
    ) -> Bool[Tensor, "batch nodes"]:
        """Return the mask of nodes that pass under the target's distribution after their parent."""
        probs = warped.softmax(-1)
        entropy = -torch.xlogy(probs, probs).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        parent = proposal.parents + 1  # on the `verified` axis, the root comes first
        index = parent * warped.shape[-1] + proposal.ids
        return probs.flatten(1).gather(1, index) >= threshold.gather(1, parent)

    def accept(self, proposal: Proposal, scored: ScoredNodes, depth: int) -> AcceptedPath:
        """Return the longest path of typical nodes, followed by the target's choice.

        Of equally long paths, the one whose end comes first in the tree is taken: it is the draft's
        likeliest, because nodes are sorted.
        """
        ancestors_BNN = ancestor_mask(proposal.parents)
        # The root always passes: it was emitted before.
        allowed_BN = pad(self.typical_nodes(proposal, scored.warped_logits), (1, 0), value=True)
        reached_BN = (allowed_BN[:, None] | ~ancestors_BNN).all(-1)
        end_B = torch.where(reached_BN, node_depths(ancestors_BNN), -1).float().argmax(1)
        next_token_B = scored.choice.gather(1, end_B[:, None])[:, 0]
        return build_accepted_path(proposal, end_B, next_token_B, depth)
