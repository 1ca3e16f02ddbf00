"""`typical`: accept tokens that are likely enough under the target; lossy, with longer paths.

Axes: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from infer.verify.base import AcceptanceRule, AcceptedPath, ScoredTree, build_accepted_path
from models.speculate.tree import Proposal, ancestor_mask, node_depths


@dataclass(frozen=True, kw_only=True)
class TypicalRule(AcceptanceRule):
    """Typical acceptance: a token of probability p passes if p >= min(epsilon, delta * exp(-H)).

    H is the entropy of the target's distribution: the threshold is high where the target is
    certain. The emitted tokens do not have the target's distribution.
    Medusa, arXiv 2401.10774, section 3.3.1.
    """

    name = "typical"
    lossless = False

    epsilon: float = 0.09
    delta: float = 0.3

    def typical_nodes(
        self, proposal: Proposal, warped: Float[Tensor, "batch verified vocab"]
    ) -> Bool[Tensor, "batch nodes"]:
        """Return the mask of nodes that pass under the target's distribution after their parent."""
        probs = warped.softmax(-1)
        entropy = -torch.xlogy(probs, probs).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        parent = proposal.parents + 1
        index = parent * warped.shape[-1] + proposal.ids
        return probs.flatten(1).gather(1, index) >= threshold.gather(1, parent)

    def accept(self, scored: ScoredTree, depth: int) -> AcceptedPath:
        return walk_typical(
            scored.proposal, scored.choice, scored.warped_logits, depth, typical=self
        )


def walk_typical(
    proposal: Proposal, choice: Int[Tensor, "batch verified"],
    warped: Float[Tensor, "batch verified vocab"], depth: int, *, typical: TypicalRule,
) -> AcceptedPath:  # fmt: skip
    """Accept the longest path of typical nodes, followed by the target's choice.

    Among equally long paths the first proposed end is taken, which is the draft's likeliest because
    nodes are sorted. `warped` are the target's logits after each node, warped as for sampling.
    """
    ancestors_BNN = ancestor_mask(proposal.parents)
    # the root was emitted before
    allowed_BN = pad(typical.typical_nodes(proposal, warped), (1, 0), value=True)
    reached_BN = (allowed_BN[:, None] | ~ancestors_BNN).all(-1)
    end_B = torch.where(reached_BN, node_depths(ancestors_BNN), -1).argmax(1)
    next_token_B = choice.gather(1, end_B[:, None])[:, 0]
    return build_accepted_path(proposal, end_B, next_token_B, depth)
