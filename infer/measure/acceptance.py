"""Count acceptance by depth and rank: how often each draft candidate is the target's token.

It is counted with a comb, a tree of the `ranks` likeliest children of the likeliest path at each
depth. After a less likely sibling, acceptance is assumed to equal that after the likeliest one, as
in Medusa's own search (arXiv 2401.10774, section 3.1).

Axes: B rows, D depth, R ranks.
"""

import heapq

import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor


def build_comb(depth: int, ranks: int) -> list[list[int]]:
    """Return the paths of a comb, by depth and rank.

    >>> build_comb(2, 3)
    [[0], [1], [2], [0, 0], [0, 1], [0, 2]]
    """
    return [[0] * above + [rank] for above in range(depth) for rank in range(ranks)]


class AcceptanceCounter:
    """A count, round by round, of the candidates of a comb that the target emits."""

    def __init__(self, depth: int, ranks: int):
        self.depth, self.ranks = depth, ranks
        self.rounds, self.hits = torch.zeros(depth), torch.zeros(depth, ranks)

    def count_rounds(self, comb_ids: Int[Tensor, "batch nodes"], text_ids: Int[Tensor, "batch path"]) -> None:
        """Count a round of each row: the tokens of its comb, and those that the text goes on with."""
        children_BDR = comb_ids.unflatten(1, (self.depth, self.ranks))
        hits_BDR = children_BDR == text_ids[:, : self.depth, None]
        # If all tokens before were the likeliest, the text's is the target's choice on this path.
        before_BD = torch.cat([torch.ones_like(hits_BDR[:, :1, 0]), hits_BDR[:, :-1, 0]], 1).cumprod(1).bool()
        self.rounds += before_BD.sum(0).cpu()
        self.hits += (hits_BDR & before_BD[:, :, None]).sum(0).cpu()

    def acceptance(self) -> Float[ndarray, "depth ranks"]:
        """Return the acceptance by depth and rank; 0 if no round got that deep."""
        return (self.hits / self.rounds.clamp_min(1)[:, None]).double().numpy()


def best_first_paths(acceptance: Float[ndarray, "depth ranks"], nodes: int) -> list[list[int]]:
    """Return the paths of the tree with the most expected accepted tokens, best path first.

    The tree has `nodes` nodes. `acceptance[d, r]` is the probability that the candidate of rank r
    below an accepted path of depth d is accepted. The probability of a path is the product of its
    candidates', and the expectation is the sum over paths. No product exceeds its parent's, so the
    `nodes` largest products form a tree, and no tree has a larger sum.

    >>> import numpy as np
    >>> best_first_paths(np.array([[0.6, 0.3], [0.6, 0.1]]), 3)
    [[0], [0, 0], [1]]
    """
    # Probabilities are negated, as heapq pops the smallest. The root comes first, with 1.
    queue: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    paths: list[list[int]] = []
    while len(paths) <= nodes:
        negated, depth, path = heapq.heappop(queue)
        paths.append(list(path))
        if depth < len(acceptance):
            for rank, share in enumerate(acceptance[depth].tolist()):
                heapq.heappush(queue, (negated * share, depth + 1, (*path, rank)))
    return paths[1:]  # without the root
