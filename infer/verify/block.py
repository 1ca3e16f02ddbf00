"""`block`: verify a drawn chain as one block, which accepts no less than token by token.

A chain that fell short early may still be taken whole where the target likes how it goes on.
Sun et al., ICLR 2025, arXiv 2403.10444. In their terms, for drafted tokens x_1 .. x_N:

    p_0 = 1;  p_i = min(1, p_{i-1} * target(x_i) / draft(x_i))        how much of x_1 .. x_i is due
    s_i = sum_x max(p_i * target(x) - draft(x), 0)                    behind x_i, for i < N
    h_i = s_i / (s_i + 1 - p_i) for i < N;  h_N = p_N                 the odds of ending at x_i

The last node whose coin is below h ends the path; behind it, what s sums is left of the target.

Axes: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from infer.verify.base import Accepted, Scored, Verifier, ending_at
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Tree, TreeKind


class Weighed(NamedTuple):
    """The chance of each node to end the path, unless a later one does; what is left behind it."""

    odds: Float[Tensor, "batch nodes"]
    target: Float[Tensor, "batch verified vocab"]  # not normalised


def weigh(
    target: Float[Tensor, "batch verified vocab"],
    draft: Float[Tensor, "batch nodes vocab"],
    ids: Int[Tensor, "batch nodes"],
) -> Weighed:
    """Judge all nodes of a chain by the probabilities before each and, of the target, behind.

    `draft` sums to 1; of a token that was not drawn it is one-hot.
    """
    before = target[:, :-1]
    target_of, draft_of = (of.gather(2, ids[:, :, None])[..., 0] for of in (before, draft))
    ratio = torch.where(draft_of > 0, target_of / draft_of, 0.0)
    ratio = ratio.clamp_max(torch.finfo(ratio.dtype).max)  # not infinite: nothing times it is 0
    due = [torch.ones_like(target[:, 0, 0])]
    for step in ratio.unbind(1):
        due.append((due[-1] * step).clamp_max(1.0))
    due = torch.stack(due, 1)
    left = (due[:, :-1, None] * before - draft).clamp_min(0.0)
    mass = left.sum(-1)
    # where target and draft are equal nothing is left, and no path ends: any distribution does
    middle = torch.where(mass > 0, mass / (mass + (1 - due[:, :-1])), 0.0)
    return Weighed(
        odds=torch.cat([middle, due[:, -1:]], 1)[:, 1:],
        target=torch.cat([torch.where(mass[..., None] > 0, left, before), target[:, -1:]], 1),
    )


@dataclass(frozen=True)
class Block(Verifier):
    """One coin a node; the residual's noise must not be what the chain was drawn with."""

    name = "block"
    ratio = True

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        if tree is not None and (tree.kind is not TreeKind.chain or tree.copied):
            raise UserError(
                f"evaluation.verification: {self.name} needs a chain without copied tokens, got "
                f"tree.kind={tree.kind.value}, tree.copied={tree.copied}; take rejection or coupled"
            )
        super().check(sampling, tree)

    def accept(self, scored: Scored, depth: int) -> Accepted:
        proposal, coins = scored.proposal, scored.coins
        assert coins is not None
        target = scored.warped.softmax(-1)
        if proposal.behind is None:  # nothing but these tokens was to come
            draft = one_hot(proposal.ids, target.shape[-1]).to(target.dtype)
        else:
            draft = proposal.behind[:, :-1].exp()
        odds, left = weigh(target, draft, proposal.ids)
        number = torch.arange(1, odds.shape[1] + 1, device=odds.device)
        node = pad(torch.where(coins < odds, number, 0), (1, 0)).amax(1)
        place = node[:, None, None].expand(-1, 1, left.shape[-1])
        own = scored.pick(left.gather(1, place)[:, 0], node)
        return ending_at(proposal, node, own, depth)
