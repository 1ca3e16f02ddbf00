"""N-gram lookup: copy the tokens that followed an earlier occurrence of the last tokens.

Nothing is trained: on its own, this is the baseline that every trained draft must beat (prompt
lookup decoding). Shapes are fixed, so all earlier positions are compared at once. In a mixed tree
lookup adds a chain to the tree of a trained draft; see docs/decoding.md.

Axes: B rows, S slots, N grown nodes, D copied nodes.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from models.drafts.base import Draft, DraftState, EmittedPath, Needs, ReadPrompts
from models.trees.growth import Proposal
from models.trees.sampling import Sampler
from models.trees.tree import MAX_CHAIN_LENGTH, Tree, TreeKind

MAX_MATCH_LENGTH = 3  # tokens of context that are compared


class NgramDraft(Draft):
    """A draft that copies chains."""

    method = "ngram"
    needs = Needs(layers=[], hidden=False, context=False)
    max_depth = trained_depth = MAX_CHAIN_LENGTH

    def passes(self, depth: int) -> int:
        """Return 0: there are no weights to read."""
        return 0

    def new_state(self, batch: int, slots: int) -> DraftState:
        """Return empty rows: a slot without a token holds -1."""
        return {
            "ids": torch.full((batch, slots), -1, dtype=torch.int64),
            "lengths": torch.zeros(batch, dtype=torch.int64),  # known tokens, the root included
        }

    def start(self, state: DraftState, prompts: ReadPrompts) -> DraftState:
        """Return the state with the prompts and their first new tokens; free slots hold -1."""
        input_ids, lengths = prompts.ids, prompts.lengths
        slot = torch.arange(state["ids"].shape[1], device=input_ids.device)
        token_ids = torch.nn.functional.pad(input_ids, (0, len(slot) - input_ids.shape[1]), value=-1)
        token_ids = torch.where(slot < lengths[:, None], token_ids, -1)
        token_ids = torch.where(slot == lengths[:, None], prompts.first_token[:, None], token_ids)
        return {"ids": token_ids, "lengths": lengths + 1}

    def advance(self, state: DraftState, emitted: EmittedPath) -> DraftState:
        token_ids, lengths = state["ids"], state["lengths"]
        new = torch.arange(emitted.ids.shape[1], device=emitted.ids.device)
        # Tokens that are not emitted land past the new length, where nothing compares them and the
        # next round overwrites them.
        slots = (lengths[:, None] + new).clamp_max(token_ids.shape[1] - 1)
        return {"ids": token_ids.scatter(1, slots, emitted.ids), "lengths": lengths + emitted.count}

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        """Return a chain of `tree.depth` tokens: a copy of those after the best match."""
        token_ids, lengths = state["ids"], state["lengths"]
        start = self._find_match(token_ids, lengths)
        step = torch.arange(tree.depth, device=token_ids.device)
        # A copy that reaches the last known token starts over, so that a period repeats.
        period = (lengths - start).clamp_min(1)[:, None]
        # step // period: a remainder of integers is beyond some compilers.
        wraps = (period[:, :, None] * (step + 1) <= step[:, None]).sum(-1)
        ids = token_ids.gather(1, start[:, None] + step - wraps * period)
        return Proposal(ids=ids, parents=(step - 1).repeat(len(ids), 1))

    def _find_match(
        self, token_ids: Int[Tensor, "batch slots"], lengths: Int[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """Return the slot of the first token to copy: the one after the best match, or the root."""
        slot = torch.arange(token_ids.shape[1], device=token_ids.device)
        match_length = torch.zeros_like(token_ids)
        is_match = torch.ones_like(token_ids, dtype=torch.bool)
        for offset in range(MAX_MATCH_LENGTH):
            earlier_token = token_ids.roll(1 + offset, 1)  # at slot s: the token at s - 1 - offset
            last_token = token_ids.gather(1, (lengths - 1 - offset).clamp_min(0)[:, None])
            is_match = is_match & (earlier_token == last_token) & (slot > offset)
            match_length = match_length + is_match
        has_match = (slot[None] < lengths[:, None]) & (match_length > 0)
        # The longest match wins, then the latest: a slot is less than the number of slots.
        # Floats hold these numbers exactly, and not every compiler has an argmax of integers.
        score = torch.where(has_match, match_length * token_ids.shape[1] + slot, -1).float()
        # A row without tokens may get any slot, but it must be a valid one.
        return torch.where(has_match.any(1), score.argmax(1), (lengths - 1).clamp_min(0))


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
        return {"draft": self.draft.new_state(batch, slots), "lookup": self.lookup.new_state(batch, slots)}

    def start(self, state: DraftState, prompts: ReadPrompts) -> DraftState:
        draft, lookup = self.draft.start(state["draft"], prompts), self.lookup.start(state["lookup"], prompts)
        return {"draft": draft, "lookup": lookup}

    def advance(self, state: DraftState, emitted: EmittedPath) -> DraftState:
        draft, lookup = self.draft.advance(state["draft"], emitted), self.lookup.advance(state["lookup"], emitted)
        return {"draft": draft, "lookup": lookup}

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        chain = Tree(kind=TreeKind.chain, depth=tree.ngram_tokens, nodes=tree.ngram_tokens)
        grown = self.draft.propose(state["draft"], tree=tree, sampler=sampler)
        copied = self.lookup.propose(state["lookup"], tree=chain, sampler=sampler)
        return graft_chain(grown, copied.ids)


def graft_chain(grown: Proposal, chain: Int[Tensor, "batch copied"]) -> Proposal:
    """Return the proposal with a chain of tokens below its root, merged with equal paths.

    As long as the tree has the chain's tokens, the next token becomes a child of the tree's node. The nodes of that
    part exist twice. The copies have no children, and `walk_choices` takes the first of equal siblings.

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
        node = torch.where(is_same_token.any(1), is_same_token.float().argmax(1), nodes + depth)
    return Proposal(
        ids=torch.cat([grown.ids, chain], 1), parents=torch.cat([grown.parents, torch.stack(parents, 1)], 1)
    )
