"""N-gram lookup: copy what followed the last tokens where they stood before. Nothing is trained.

The floor that every trained draft must beat (prompt lookup decoding). As a Draft of fixed shapes:
all earlier places are compared at once, the longest match wins, the latest among equals.

Axes: B rows, S slots.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from models.drafts.base import Draft, Needs, State
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree
from models.target.language_model import Seen


class NgramDraft(Draft):
    """Proposes a chain. `longest` is how many tokens of context are compared."""

    method = "ngram"

    def __init__(self, *, longest: int = 3, max_depth: int = 64):
        super().__init__()
        self.longest = longest
        self.needs = Needs(layers=[], hidden=False, context=False)
        self.max_depth = self.trained_depth = max_depth

    def passes(self, depth: int) -> int:  # noqa: ARG002
        """It has no weights to read."""
        return 0

    def new_state(self, batch: int, slots: int) -> State:
        return {
            "ids": torch.full((batch, slots), -1, dtype=torch.int64),
            "lengths": torch.zeros(batch, dtype=torch.int64),  # known tokens, the root included
        }

    def start(
        self, state: State, ids: Int[Tensor, "batch prompt"], *, lengths: Int[Tensor, " batch"],
        first: Int[Tensor, " batch"], seen: Seen | None,  # noqa: ARG002
    ) -> State:  # fmt: skip
        slot = torch.arange(state["ids"].shape[1], device=ids.device)
        slots = len(slot) - ids.shape[1]
        known = torch.nn.functional.pad(ids, (0, slots), value=-1)
        known = torch.where(slot < lengths[:, None], known, -1)
        known = torch.where(slot == lengths[:, None], first[:, None], known)
        return {"ids": known, "lengths": lengths + 1}

    def advance(
        self, state: State, ids: Int[Tensor, "batch path"], *, count: Int[Tensor, " batch"],
        seen: Seen | None,  # noqa: ARG002
    ) -> State:  # fmt: skip
        known, lengths = state["ids"], state["lengths"]
        new = torch.arange(ids.shape[1], device=ids.device)
        # what is not emitted lands behind `lengths`, is never compared and is written over
        slots = (lengths[:, None] + new).clamp_max(known.shape[1] - 1)
        return {"ids": known.scatter(1, slots, ids), "lengths": lengths + count}

    def propose(
        self,
        state: State,
        *,
        tree: Tree,
        sampler: Sampler,  # noqa: ARG002
    ) -> Proposal:
        known, lengths = state["ids"], state["lengths"]
        start = self._match(known, lengths)
        step = torch.arange(tree.depth, device=known.device)
        # behind the last known token the copy goes round: a period repeats
        period = (lengths - start).clamp_min(1)[:, None]
        ids = known.gather(1, start[:, None] + step % period)
        return Proposal(ids=ids, parents=(step - 1).expand_as(ids))

    def _match(
        self, known: Int[Tensor, "batch slots"], lengths: Int[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """Slot of the token to copy: the one behind the best earlier match (else the root)."""
        slot = torch.arange(known.shape[1], device=known.device)
        matched = torch.zeros_like(known)
        same = torch.ones_like(known, dtype=torch.bool)
        for back in range(self.longest):
            theirs = known.roll(1 + back, 1)  # at slot s: the token at s - 1 - back
            ours = known.gather(1, (lengths - 1 - back).clamp_min(0)[:, None])
            same = same & (theirs == ours) & (slot > back)
            matched = matched + same
        earlier = (slot[None] < lengths[:, None]) & (matched > 0)
        score = torch.where(earlier, matched * known.shape[1] + slot, -1)
        best = score.argmax(1)
        # a row without work knows no token: any slot will do, but it must be one
        return torch.where(earlier.any(1), best, (lengths - 1).clamp_min(0))
