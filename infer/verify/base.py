"""Interface of the acceptance rules: a scored tree in, an accepted path out.

Axes: B rows, N root and nodes (in models/trees/ without the root), D levels of a path, the root's included.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from infer.verify.config import Verification
from models.io.errors import require
from models.operators import DROPPED_SCORE, gather_mask
from models.trees.growth import Proposal, ancestor_mask, node_depths
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree, TreeKind


@dataclass(kw_only=True)
class ScoredNodes:
    """The target's logits at the root and all nodes, and the random numbers of the round.

    The `verified` axis is the root and then all nodes; logits of a node are for the token after it.
    """

    warped_logits: Float[Tensor, "batch verified vocab"]  # the target's, after temperature etc.
    noise: Float[Tensor, "batch verified vocab"] | None = None  # Gumbel; None: greedy
    uniforms: Float[Tensor, "batch nodes"] | None = None  # uniform in (0, 1), one for each node

    @property
    def scores(self) -> Float[Tensor, "batch verified vocab"]:
        """Return the score of every token after each node; the target chooses the largest."""
        return self.warped_logits if self.noise is None else self.warped_logits + self.noise

    @property
    def choice(self) -> Int[Tensor, "batch verified"]:
        """Return the token that the target chooses after each node, the lowest id among equals."""
        return self.scores.argmax(-1)

    def sample_token(self, weights: Float[Tensor, "batch vocab"], node: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Return the token after `node`, sampled from `weights` (Gumbel-max trick)."""
        assert self.noise is not None
        index = node[:, None, None].expand(-1, 1, weights.shape[-1])
        return (weights.log().clamp_min(DROPPED_SCORE) + self.noise.gather(1, index)[:, 0]).argmax(-1)


@dataclass(kw_only=True)
class AcceptedPath:
    """The path and tokens that one round emits, padded to the deepest possible path."""

    ids: Int[Tensor, "batch path"]  # accepted draft tokens, then the target's token
    nodes: Int[Tensor, "batch path"]  # indices of the `verified` axis, from the root's, 0; the last repeats
    count: Int[Tensor, " batch"]  # number of emitted `ids`: 1 .. depth + 1


def accept_root(scored: ScoredNodes) -> AcceptedPath:
    """Return what every rule accepts if there is no tree: the target's own token."""
    root = torch.zeros_like(scored.choice)
    return AcceptedPath(ids=scored.choice, nodes=root, count=root[:, 0] + 1)


def build_accepted_path(
    proposal: Proposal, end: Int[Tensor, " batch"], next_token: Int[Tensor, " batch"], depth: int
) -> AcceptedPath:
    """Return the path from the root to `end`, an index of the `verified` axis, followed by the target's `next_token`.

    >>> tree = Proposal(ids=torch.tensor([[7, 8, 9]]), parents=torch.tensor([[-1, -1, 1]]))
    >>> build_accepted_path(tree, torch.tensor([3]), torch.tensor([5]), depth=3)
    AcceptedPath(ids=tensor([[8, 9, 5, 5]]), nodes=tensor([[0, 2, 3, 3]]), count=tensor([3]))
    """
    ancestors_BNN = ancestor_mask(proposal.parents)
    depth_BN = node_depths(ancestors_BNN)
    end_B1 = end[:, None]
    length_B1 = depth_BN.gather(1, end_B1)
    level_D = torch.arange(depth + 1, device=end.device)
    end_B1N = end_B1[:, :, None].expand_as(ancestors_BNN[:, :1])
    path_BN = gather_mask(ancestors_BNN, 1, end_B1N)[:, 0]
    at_level_BDN = path_BN[:, None] & (depth_BN[:, None] == level_D[:, None])
    nodes_BD = torch.where(level_D <= length_B1, at_level_BDN.float().argmax(-1), end_B1)
    token_BD = pad(proposal.ids, (1, 0)).gather(1, nodes_BD.roll(-1, 1))  # of the path's next node
    ids_BD = torch.where(level_D < length_B1, token_BD, next_token[:, None])
    return AcceptedPath(ids=ids_BD, nodes=nodes_BD, count=length_B1[:, 0] + 1)


class AcceptanceRule:
    """A rule of acceptance: a function of tensors of fixed shapes without control flow."""

    verification: ClassVar[Verification]  # its name and what it promises
    graph_key = property(str)  # what compiled graphs depend on; see models/device/graph_budget.py

    @property
    def name(self) -> str:
        return self.verification.value

    def needs_drawn_tokens(self, tree: Tree) -> bool:
        """Return True if the proof needs the tree's tokens sampled and their probabilities known.

        A dynamic tree keeps its likeliest nodes, which is not sampling: for a ratio test it is built
        without noise and verified as a deterministic tree.
        """
        return self.verification.is_ratio_test and tree.kind is not TreeKind.dynamic

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        """Raise UserError unless the rule is proven for this sampling and, if there is one, tree."""
        self.verification.check_sampling(sampling)
        require(
            tree is None or not tree.ngram_tokens or not self.needs_drawn_tokens(tree),
            f"evaluation.verification: {self.name} needs tokens drawn from the draft, got "
            f"tree.ngram_tokens={tree and tree.ngram_tokens}; set it to 0 or take coupled",
        )

    def accept(self, proposal: Proposal, scored: ScoredNodes, depth: int) -> AcceptedPath:
        """Return one path of the tree and one token after it; no path is longer than `depth`."""
        raise NotImplementedError
