"""A trained draft and n-gram lookup in one tree: what the context has said before costs no layer.

The draft grows its tree as ever; beside it hangs a chain of `tree.copied` tokens, copied from where
the last tokens stood before. Names, loops and quotations come from there, the rest from the draft.

Axes: B rows, N grown nodes, D copied nodes.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from models.drafts.base import Draft, State
from models.drafts.ngram import NgramDraft
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree, TreeKind
from models.target.language_model import Seen


class MixedDraft(Draft):
    """Decodes as `draft` does, with lookup beside it. It is neither trained nor saved."""

    method = "mixed"

    def __init__(self, draft: Draft):
        super().__init__()
        self.draft, self.lookup = draft, NgramDraft()
        self.needs = draft.needs
        self.max_depth, self.trained_depth = draft.max_depth, draft.trained_depth

    @property
    def kind(self) -> str:
        return f"{self.method}_{self.draft.kind}"

    def passes(self, depth: int) -> int:
        return self.draft.passes(depth)

    def new_state(self, batch: int, slots: int) -> State:
        return {
            "draft": self.draft.new_state(batch, slots),
            "lookup": self.lookup.new_state(batch, slots),
        }

    def start(
        self, state: State, ids: Int[Tensor, "batch prompt"], *, lengths: Int[Tensor, " batch"],
        first: Int[Tensor, " batch"], seen: Seen,
    ) -> State:  # fmt: skip
        return {
            name: part.start(state[name], ids, lengths=lengths, first=first, seen=seen)
            for name, part in (("draft", self.draft), ("lookup", self.lookup))
        }

    def advance(
        self, state: State, ids: Int[Tensor, "batch path"], *, count: Int[Tensor, " batch"],
        seen: Seen,
    ) -> State:  # fmt: skip
        return {
            name: part.advance(state[name], ids, count=count, seen=seen)
            for name, part in (("draft", self.draft), ("lookup", self.lookup))
        }

    def propose(self, state: State, *, tree: Tree, sampler: Sampler) -> Proposal:
        chain = Tree(kind=TreeKind.chain, depth=tree.copied, nodes=tree.copied)
        grown = self.draft.propose(state["draft"], tree=tree, sampler=sampler)
        copied = self.lookup.propose(state["lookup"], tree=chain, sampler=sampler)
        return graft(grown, copied.ids)


def graft(grown: Proposal, chain: Int[Tensor, "batch copied"]) -> Proposal:
    """Hang a chain of tokens on the root; as far as the tree holds it already, it follows the tree.

    The nodes of that part are there twice. The later ones have no children, and `walk` takes the
    first of equal siblings.

    >>> tree = Proposal(ids=torch.tensor([[7, 8]]), parents=torch.tensor([[-1, -1]]))
    >>> graft(tree, torch.tensor([[8, 5]]))  # 5 hangs on the 8 that was there
    Proposal(ids=tensor([[7, 8, 8, 5]]), parents=tensor([[-1, -1, -1,  1]]))
    """
    nodes = grown.ids.shape[1]
    node = torch.full_like(chain[:, 0], -1)
    parents = []
    for depth, token in enumerate(chain.unbind(1)):
        parents.append(node)
        fits = (grown.parents == node[:, None]) & (grown.ids == token[:, None])
        node = torch.where(fits.any(1), fits.int().argmax(1), nodes + depth)
    return Proposal(
        ids=torch.cat([grown.ids, chain], 1),
        parents=torch.cat([grown.parents, torch.stack(parents, 1)], 1),
    )
