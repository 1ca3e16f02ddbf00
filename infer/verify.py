"""Accept one path of a token tree: the one that the target itself would have taken (`walk`).

The target chooses one token behind every node: its likeliest one (greedy), or the one that its own
keyed noise picks (`coupled`, inference by sample-and-walk: Rowan et al., arXiv 2506.05632). Walking
from the root along these choices emits exactly what decoding one token at a time would emit, for
any tree and any draft.

`walk_typical` gives that up for longer paths: it accepts what the target might well have said.

Axes: B rows, N nodes, D deepest node, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from models.errors import UserError
from models.sampling import SamplingConf
from models.tree import Proposal, ancestors, depths


@dataclass(kw_only=True)
class Accepted:
    """What one round emits, padded to the deepest possible path."""

    ids: Int[Tensor, "batch path"]  # emitted: accepted draft tokens and the target's own one
    nodes: Int[Tensor, "batch path"]  # the path: node 0 is the root; repeats where it ended
    count: Int[Tensor, " batch"]  # how many of `ids` are emitted: 1 .. depth + 1


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


@dataclass(frozen=True, kw_only=True)
class Typical:
    """How likely a token must be to pass for the target's, where that has entropy H.

    p >= min(epsilon, delta * exp(-H)): where the target is sure little else passes, where it
    hesitates most does. What is emitted no longer has the target's distribution.
    Medusa, arXiv 2401.10774, section 3.3.1.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def check(self, sampling: SamplingConf) -> None:
        """Raises UserError for greedy decoding, where one token alone is right."""
        if sampling.temperature == 0:
            raise UserError(
                "evaluation.verification: typical needs evaluation.sampling.temperature above 0, "
                f"got {sampling.temperature}; raise it or take exact"
            )

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


def walk_typical(
    proposal: Proposal, choice: Int[Tensor, "batch verified"],
    warped: Float[Tensor, "batch verified vocab"], depth: int, *, typical: Typical,
) -> Accepted:  # fmt: skip
    """The longest path of typical nodes, and behind it the target's own choice.

    Of equally long paths the one whose end is proposed first: the draft's likeliest, for it lists
    its nodes so. `warped` are the target's logits behind each node as sampling sees them.
    """
    sees_BNN = ancestors(proposal.parents)
    depth_BN = depths(sees_BNN)
    allowed_BN = pad(typical.allows(proposal, warped), (1, 0), value=True)  # the root is emitted
    reached_BN = (allowed_BN[:, None] | ~sees_BNN).all(-1)
    last_B1 = torch.where(reached_BN, depth_BN, -1).argmax(1, keepdim=True)
    length_B1 = depth_BN.gather(1, last_B1)

    step_D = torch.arange(depth + 1, device=choice.device)
    path_BN = sees_BNN.gather(1, last_B1[:, :, None].expand_as(sees_BNN[:, :1]))[:, 0]
    here_BDN = path_BN[:, None] & (depth_BN[:, None] == step_D[:, None])
    nodes_BD = torch.where(step_D <= length_B1, here_BDN.int().argmax(-1), last_B1)
    token_BD = pad(proposal.ids, (1, 0)).gather(1, nodes_BD.roll(-1, 1))  # of the node after
    ids_BD = torch.where(step_D < length_B1, token_BD, choice.gather(1, last_B1))
    return Accepted(ids=ids_BD, nodes=nodes_BD, count=length_B1[:, 0] + 1)
