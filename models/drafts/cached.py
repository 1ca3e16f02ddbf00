"""A draft with keys and values of its own: reads what was emitted, then grows a tree behind it.

    slots:  [ read 0 .. length-1 | nodes expanded while growing ... | garbage ]

Nodes are written behind the known tokens and forgotten with the round: the next `advance` writes
over them.

Axes: B rows, T tokens, W tree nodes expanded at once, H hidden, S slots.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.drafts.base import Draft, State
from models.speculate.sampling import Sampler
from models.speculate.tree import Proposal, Tree, grow
from models.target.cache import tree_mask
from models.target.language_model import Seen


class CachedDraft(Draft):
    """A method says what one pass over new tokens is; the state holds `lengths` and `hidden`."""

    target_vocab: int  # tokens that the target knows

    def step(
        self, state: State, tokens: Int[Tensor, "b t"], hidden: Tensor, *,
        positions: Int[Tensor, "b t"], slots: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
    ) -> Float[Tensor, "b t h"]:  # fmt: skip
        """One pass: writes at `slots`, reads through `mask`.

        `hidden` is the target's feature before each token, or the output of the node above it.
        """
        raise NotImplementedError

    def slots(self, state: State) -> int:
        """Of the cache, the garbage slot included."""
        raise NotImplementedError

    def features(self, seen: Seen) -> Float[Tensor, "b t h"]:
        """What a pass over emitted tokens takes from the target."""
        raise NotImplementedError

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t draft_vocab"]:
        raise NotImplementedError

    def advance(
        self, state: State, ids: Int[Tensor, "b path"], *, count: Int[Tensor, " b"], seen: Seen
    ) -> State:
        lengths = state["lengths"]
        new = torch.arange(ids.shape[1], device=ids.device)
        causal = (new <= new[:, None]).expand(len(ids), -1, -1)
        rows = lengths[:, None] + new
        mask = tree_mask(lengths, causal, self.slots(state))
        return self.read(state, ids, seen, rows=rows, mask=mask, count=count)

    def read(
        self, state: State, tokens: Int[Tensor, "b t"], seen: Seen, *, rows: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b 1 t s"], count: Int[Tensor, " b"],
    ) -> State:  # fmt: skip
        """Rows with true features; `count` of them are kept, the rest is written over later."""
        # a row that has ended may stand at the last slots: what does not fit goes to garbage
        slots = rows.clamp_max(mask.shape[-1] - 1)
        hidden = self.step(
            state, tokens, self.features(seen), positions=rows, slots=slots, mask=mask
        )
        last = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        kept = (count > 0)[:, None]  # rows without work keep what they had
        return state | {
            "lengths": state["lengths"] + count,
            "hidden": torch.where(kept, hidden.gather(1, last)[:, 0], state["hidden"]),
        }

    def propose(self, state: State, *, tree: Tree, sampler: Sampler) -> Proposal:
        lengths, slots = state["lengths"], self.slots(state)
        hidden = state["hidden"][:, None]
        sees = lengths.new_zeros((len(lengths), 1, max(tree.scratch, 1)), dtype=torch.bool)
        used = level = 0

        def expand(tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal hidden, sees, used, level
            own = torch.arange(sees.shape[-1], device=tokens.device)
            new = used + torch.arange(tokens.shape[1], device=tokens.device)
            sees = sees.gather(1, above[:, :, None].expand(-1, -1, sees.shape[-1]))
            sees = sees | (own == new[:, None])
            hidden = hidden.gather(1, above[:, :, None].expand(-1, -1, hidden.shape[-1]))
            hidden = self.step(
                state, tokens, hidden,
                positions=(lengths + level)[:, None].expand_as(tokens),
                slots=(lengths[:, None] + new).clamp_max(slots - 1),
                mask=tree_mask(lengths, sees, slots),
            )  # fmt: skip
            used, level = used + tokens.shape[1], level + 1
            return self.logits(hidden)

        return grow(
            tree, sampler, self.logits(hidden)[:, 0], expand,
            kept_ids=self.kept_ids, vocab=self.target_vocab,
        )  # fmt: skip
