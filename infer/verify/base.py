"""What a verifier is told of a round, what it answers, and which rounds it may be asked about.

Axes: B rows, N nodes (root not counted), D deepest node, V vocabulary. [B, N+1]: the root first.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Proposal, Tree, TreeKind, ancestors, depths


class Verification(Enum):
    """Which draft tokens are accepted; see docs/exactness.md."""

    auto = "auto"  # greedy at temperature 0, else coupled
    greedy = "greedy"
    coupled = "coupled"
    rejection = "rejection"
    block = "block"
    typical = "typical"  # lossy: marked wherever a figure of it is printed


@dataclass(kw_only=True)
class Scored:
    """What one target pass says of a tree, and the chance that goes into judging it."""

    proposal: Proposal
    warped: Float[Tensor, "batch verified vocab"]  # target logits as sampling sees them
    noise: Float[Tensor, "batch verified vocab"] | None = None  # Gumbel; None: greedy
    coins: Float[Tensor, "batch nodes"] | None = None  # uniform in (0, 1), one a node

    @property
    def scores(self) -> Float[Tensor, "batch verified vocab"]:
        """Of all tokens behind each node; the target takes the largest."""
        return self.warped if self.noise is None else self.warped + self.noise

    @property
    def choice(self) -> Int[Tensor, "batch verified"]:
        """The token that the target takes behind each node, the lowest id among equals."""
        return self.scores.argmax(-1)

    def pick(
        self, weights: Float[Tensor, "batch vocab"], node: Int[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """A token drawn from `weights`, of any sum, with the noise behind `node`."""
        scores = weights.log()
        if self.noise is not None:
            place = node[:, None, None].expand(-1, 1, weights.shape[-1])
            scores = scores + self.noise.gather(1, place)[:, 0]
        return scores.argmax(-1)


@dataclass(kw_only=True)
class Accepted:
    """What one round emits, padded to the deepest possible path."""

    ids: Int[Tensor, "batch path"]  # emitted: accepted draft tokens and the target's own one
    nodes: Int[Tensor, "batch path"]  # the path: node 0 is the root; repeats where it ended
    count: Int[Tensor, " batch"]  # how many of `ids` are emitted: 1 .. depth + 1


def ending_at(
    proposal: Proposal, end: Int[Tensor, " batch"], own: Int[Tensor, " batch"], depth: int
) -> Accepted:
    """The path from the root to node `end`, and the target's `own` token behind it.

    >>> tree = Proposal(ids=torch.tensor([[7, 8, 9]]), parents=torch.tensor([[-1, -1, 1]]))
    >>> ending_at(tree, torch.tensor([3]), torch.tensor([5]), depth=3)
    Accepted(ids=tensor([[8, 9, 5, 5]]), nodes=tensor([[0, 2, 3, 3]]), count=tensor([3]))
    """
    sees_BNN = ancestors(proposal.parents)
    depth_BN = depths(sees_BNN)
    end_B1 = end[:, None]
    length_B1 = depth_BN.gather(1, end_B1)
    step_D = torch.arange(depth + 1, device=end.device)
    path_BN = sees_BNN.gather(1, end_B1[:, :, None].expand_as(sees_BNN[:, :1]))[:, 0]
    here_BDN = path_BN[:, None] & (depth_BN[:, None] == step_D[:, None])
    nodes_BD = torch.where(step_D <= length_B1, here_BDN.int().argmax(-1), end_B1)
    token_BD = pad(proposal.ids, (1, 0)).gather(1, nodes_BD.roll(-1, 1))  # of the node after
    ids_BD = torch.where(step_D < length_B1, token_BD, own[:, None])
    return Accepted(ids=ids_BD, nodes=nodes_BD, count=length_B1[:, 0] + 1)


class Verifier:
    """One rule of acceptance: a function of tensors, of fixed shape and without control flow."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True  # what is emitted has the target's distribution
    ratio: ClassVar[bool] = False  # compares with the draft's probabilities, by coins
    greedy: ClassVar[bool] = False

    def draws(self, tree: Tree) -> bool:
        """Whether the tree's tokens must be drawn, with noise of their own, and say from what.

        A dynamic tree keeps its likeliest nodes, which is no draw: it grows without noise, and is
        verified as the deterministic tree that it is.
        """
        return self.ratio and tree.kind is not TreeKind.dynamic

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        """Raises UserError for what has no proof; without a tree, for what no tree would help."""
        if self.greedy and sampling.temperature > 0:
            raise UserError(
                f"evaluation.verification: {self.name} needs evaluation.sampling.temperature 0, "
                f"got {sampling.temperature}; take coupled"
            )
        if not self.greedy and sampling.temperature == 0:
            raise UserError(
                f"evaluation.verification: {self.name} needs evaluation.sampling.temperature "
                f"above 0, got {sampling.temperature}; raise it or take greedy"
            )
        if tree is not None and self.draws(tree) and tree.copied:
            raise UserError(
                f"evaluation.verification: {self.name} needs tokens drawn from the draft, got "
                f"tree.copied={tree.copied}; set it to 0 or take coupled"
            )

    def accept(self, scored: Scored, depth: int) -> Accepted:
        """Keep one path of the tree, and one token behind it."""
        raise NotImplementedError
