"""`block`: verify a sampled chain jointly, which accepts at least as much as token by token.

A chain with an unlikely early token may still be accepted if its later tokens make up for it.
Sun et al., ICLR 2025, arXiv 2403.10444. In their terms, for drafted tokens x_1 .. x_N:

    p_0 = 1;  p_i = min(1, p_{i-1} * target(x_i) / draft(x_i))     acceptable share of x_1 .. x_i
    s_i = sum_x max(p_i * target(x) - draft(x), 0)                 residual mass after x_i, i < N
    h_i = s_i / (s_i + 1 - p_i) for i < N;  h_N = p_N              probability of ending at x_i

The path ends at the last node whose uniform number is below h; the next token is sampled from the
residual, the terms that s sums.

Axes: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from infer.verify.base import AcceptanceRule, AcceptedPath, ScoredTree, build_accepted_path
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Tree, TreeKind


class BlockResidual(NamedTuple):
    """The probability that the path ends at each node, and the residual target distributions.

    The probability of a node is conditional: the path ends at no later one.
    """

    end_prob: Float[Tensor, "batch nodes"]
    target: Float[Tensor, "batch verified vocab"]  # not normalized


def compute_block_residual(
    target: Float[Tensor, "batch verified vocab"],
    draft: Float[Tensor, "batch nodes vocab"],
    ids: Int[Tensor, "batch nodes"],
) -> BlockResidual:
    """Compute the residuals of a chain from the target's and the draft's probabilities.

    `draft` sums to 1; it is one-hot where a token was not sampled.
    """
    before = target[:, :-1]
    target_prob, draft_prob = (
        probs.gather(2, ids[:, :, None])[..., 0] for probs in (before, draft)
    )
    ratio = torch.where(draft_prob > 0, target_prob / draft_prob, 0.0)
    ratio = ratio.clamp_max(torch.finfo(ratio.dtype).max)  # 0 times infinity would be NaN
    acceptable = [torch.ones_like(target[:, 0, 0])]
    for step in ratio.unbind(1):
        acceptable.append((acceptable[-1] * step).clamp_max(1.0))
    acceptable = torch.stack(acceptable, 1)
    residual = (acceptable[:, :-1, None] * before - draft).clamp_min(0.0)
    mass = residual.sum(-1)
    # where target and draft are equal no mass is left and no path ends: any distribution will do
    middle = torch.where(mass > 0, mass / (mass + (1 - acceptable[:, :-1])), 0.0)
    return BlockResidual(
        end_prob=torch.cat([middle, acceptable[:, -1:]], 1)[:, 1:],
        target=torch.cat([torch.where(mass[..., None] > 0, residual, before), target[:, -1:]], 1),
    )


@dataclass(frozen=True)
class BlockRule(AcceptanceRule):
    """Block verification, with one uniform number for each node.

    The residual must be sampled with other noise than the chain.
    """

    name = "block"
    is_ratio_test = True

    def check(self, sampling: SamplingConf, tree: Tree | None = None) -> None:
        if tree is not None and (tree.kind is not TreeKind.chain or tree.copied):
            raise UserError(
                f"evaluation.verification: {self.name} needs a chain without copied tokens, got "
                f"tree.kind={tree.kind.value}, tree.copied={tree.copied}; take rejection or coupled"
            )
        super().check(sampling, tree)

    def accept(self, scored: ScoredTree, depth: int) -> AcceptedPath:
        proposal, uniforms = scored.proposal, scored.uniforms
        assert uniforms is not None
        target = scored.warped_logits.softmax(-1)
        if proposal.child_log_probs is None:  # the chain is deterministic
            draft = one_hot(proposal.ids, target.shape[-1]).to(target.dtype)
        else:
            draft = proposal.child_log_probs[:, :-1].exp()
        end_prob, residual = compute_block_residual(target, draft, proposal.ids)
        number = torch.arange(1, end_prob.shape[1] + 1, device=end_prob.device)
        node = pad(torch.where(uniforms < end_prob, number, 0), (1, 0)).amax(1)
        index = node[:, None, None].expand(-1, 1, residual.shape[-1])
        next_token = scored.sample_token(residual.gather(1, index)[:, 0], node)
        return build_accepted_path(proposal, node, next_token, depth)
