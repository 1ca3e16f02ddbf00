"""`typical`: accept what the target might well have said. Longer paths; not its distribution.

Axes: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from infer.verify.base import Accepted, Scored, Verifier, ending_at
from models.speculate.tree import Proposal, ancestors, depths


@dataclass(frozen=True, kw_only=True)
class Typical(Verifier):
    """How likely a token must be to pass for the target's, where that has entropy H.

    p >= min(epsilon, delta * exp(-H)): where the target is sure little else passes, where it
    hesitates most does. What is emitted no longer has the target's distribution.
    Medusa, arXiv 2401.10774, section 3.3.1.
    """

    name = "typical"
    lossless = False

    epsilon: float = 0.09
    delta: float = 0.3

    def allows(
        self, proposal: Proposal, warped: Float[Tensor, "batch verified vocab"]
    ) -> Bool[Tensor, "batch nodes"]:
        """Which nodes are typical of the target's distribution behind their parent."""
        probs = warped.softmax(-1)
        entropy = -torch.xlogy(probs, probs).sum(-1)
        least = (self.delta * (-entropy).exp()).clamp_max(self.epsilon)
        parent = proposal.parents + 1
        place = parent * warped.shape[-1] + proposal.ids
        return probs.flatten(1).gather(1, place) >= least.gather(1, parent)

    def accept(self, scored: Scored, depth: int) -> Accepted:
        return walk_typical(scored.proposal, scored.choice, scored.warped, depth, typical=self)


def walk_typical(
    proposal: Proposal, choice: Int[Tensor, "batch verified"],
    warped: Float[Tensor, "batch verified vocab"], depth: int, *, typical: Typical,
) -> Accepted:  # fmt: skip
    """The longest path of typical nodes, and behind it the target's own choice.

    Of equally long paths the one whose end is proposed first: the draft's likeliest, for it lists
    its nodes so. `warped` are the target's logits behind each node as sampling sees them.
    """
    sees_BNN = ancestors(proposal.parents)
    allowed_BN = pad(typical.allows(proposal, warped), (1, 0), value=True)  # the root is emitted
    reached_BN = (allowed_BN[:, None] | ~sees_BNN).all(-1)
    end_B = torch.where(reached_BN, depths(sees_BNN), -1).argmax(1)
    own_B = choice.gather(1, end_B[:, None])[:, 0]
    return ending_at(proposal, end_B, own_B, depth)
