"""A trained draft and n-gram lookup in one tree: lookup proposes repeated text without a model.

The draft grows its tree as usual; n-gram lookup adds a chain of `tree.copied` tokens that followed
an earlier occurrence of the last tokens. It finds names, loops and quotations; the draft proposes
the rest.

Axes: B rows, N grown nodes, D copied nodes.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from models.drafts.base import Draft, DraftState
from models.drafts.ngram import NgramDraft
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree, TreeKind
from models.target.language_model import TargetOutput


class MixedDraft(Draft):
    """A draft combined with n-gram lookup for decoding only: it is neither trained nor saved."""

    method = "mixed"

    def __init__(self, draft: Draft):
        super().__init__()
        self.draft, self.lookup = draft, NgramDraft()
        self.needs = draft.needs
        self.max_depth, self.trained_depth = draft.max_depth, draft.trained_depth

    @property
    def graph_kind(self) -> str:
        return f"{self.method}_{self.draft.graph_kind}"

    def passes(self, depth: int) -> int:
        return self.draft.passes(depth)

    def new_state(self, batch: int, slots: int) -> DraftState:
        return {
            "draft": self.draft.new_state(batch, slots),
            "lookup": self.lookup.new_state(batch, slots),
        }

    def start(
        self,
        state: DraftState,
        input_ids: Int[Tensor, "batch prompt"],
        *,
        lengths: Int[Tensor, " batch"],
        first_token: Int[Tensor, " batch"],
        target_output: TargetOutput,
    ) -> DraftState:
        return {
            name: draft.start(
                state[name],
                input_ids,
                lengths=lengths,
                first_token=first_token,
                target_output=target_output,
            )
            for name, draft in (("draft", self.draft), ("lookup", self.lookup))
        }

    def advance(
        self, state: DraftState, input_ids: Int[Tensor, "batch path"], *,
        count: Int[Tensor, " batch"], target_output: TargetOutput,
    ) -> DraftState:  # fmt: skip
        return {
            name: draft.advance(state[name], input_ids, count=count, target_output=target_output)
            for name, draft in (("draft", self.draft), ("lookup", self.lookup))
        }

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        chain = Tree(kind=TreeKind.chain, depth=tree.copied, nodes=tree.copied)
        grown = self.draft.propose(state["draft"], tree=tree, sampler=sampler)
        copied = self.lookup.propose(state["lookup"], tree=chain, sampler=sampler)
        return graft_chain(grown, copied.ids)


def graft_chain(grown: Proposal, chain: Int[Tensor, "batch copied"]) -> Proposal:
    """Add a chain of tokens below the root; where the tree holds its tokens, it follows the tree.

    The nodes of that part exist twice. The later ones have no children, and `walk_choices` takes
    the first of equal siblings.

    >>> tree = Proposal(ids=torch.tensor([[7, 8]]), parents=torch.tensor([[-1, -1]]))
    >>> graft_chain(tree, torch.tensor([[8, 5]]))  # 5 becomes a child of the first 8
    Proposal(ids=tensor([[7, 8, 8, 5]]), parents=tensor([[-1, -1, -1,  1]]))
    """
    nodes = grown.ids.shape[1]
    node = torch.full_like(chain[:, 0], -1)
    parents = []
    for depth, token in enumerate(chain.unbind(1)):
        parents.append(node)
        is_same_token = (grown.parents == node[:, None]) & (grown.ids == token[:, None])
        node = torch.where(is_same_token.any(1), is_same_token.int().argmax(1), nodes + depth)
    return Proposal(
        ids=torch.cat([grown.ids, chain], 1),
        parents=torch.cat([grown.parents, torch.stack(parents, 1)], 1),
    )
