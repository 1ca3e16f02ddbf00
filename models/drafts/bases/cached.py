"""Decoding with a key-value cache of the draft's own.

    slots:  [ known tokens 0 .. length-1 | nodes expanded while growing ... | garbage ]

The cache has one entry for each input read. A language model reads tokens, so that its `lengths` count the root, the
last emitted token. An EAGLE draft reads pairs, the target's feature of a token with the token after it, so that its
`lengths` and positions are one less. `advance` overwrites the expanded nodes: no key moves.

Axes: B rows, T tokens, W tree nodes expanded at once, H hidden, S slots.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.drafts.base import Draft, DraftState, EmittedPath, with_last_hidden
from models.layers import attend
from models.operators import gather_mask
from models.targets.cache import slot_index, tree_mask
from models.targets.language_model import TargetOutput
from models.trees.growth import Proposal, grow
from models.trees.sampling import Sampler
from models.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class CachePass:
    """The positions of a pass's tokens, the slots of the cache that it writes, and those that it attends to."""

    positions: Int[Tensor, "b t"]
    slots: Int[Tensor, "b t"]
    mask: Bool[Tensor, "b 1 t s"]


class CachedDecoding(Draft):
    """A draft whose method adds one pass over new tokens and the tensors it needs.

    The state holds at least `lengths` [B] and `hidden` [B, H], the last output of each row.
    """

    target_vocab: int  # size of the target's vocabulary

    def forward_step(
        self, state: DraftState, tokens: Int[Tensor, "b t"], hidden: Tensor, cache_pass: CachePass
    ) -> Float[Tensor, "b t h"]:
        """Run one pass over tokens and the cache, and return the outputs.

        `hidden` is the target's feature before each token, or the output of its parent node.
        """
        raise NotImplementedError

    def target_features(self, target_output: TargetOutput) -> Float[Tensor, "b t h"]:
        """Return what a pass over emitted tokens reads: by default the final hidden states."""
        return target_output.hidden

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t draft_vocab"]:
        """Return the raw logits of the outputs of a pass."""
        raise NotImplementedError

    def num_slots(self, state: DraftState) -> int:
        """Return the number of slots of the cache, the garbage slot included."""
        return state["keys"].shape[2]

    def advance(self, state: DraftState, emitted: EmittedPath) -> DraftState:
        """Run a pass over the emitted tokens; return the state after them.

        It overwrites the nodes of the last round. Later passes overwrite what this one writes for
        the ids past those that are emitted.
        """
        lengths, slots = state["lengths"], self.num_slots(state)
        positions = lengths[:, None] + torch.arange(emitted.ids.shape[1], device=lengths.device)
        slot = torch.arange(slots, device=lengths.device)
        cache_pass = CachePass(
            positions=positions,
            # A row that has ended may have no slots left: it writes to the last, the garbage slot.
            slots=positions.clamp_max(slots - 1),
            mask=(slot <= positions[:, :, None])[:, None],
        )
        hidden = self.forward_step(state, emitted.ids, self.target_features(emitted.target_output), cache_pass)
        return with_last_hidden(state | {"lengths": lengths + emitted.count}, hidden, emitted.count)

    def propose(self, state: DraftState, *, tree: Tree, sampler: Sampler) -> Proposal:
        """Grow a tree and return it; its expanded nodes use the slots after the known tokens."""
        lengths, slots = state["lengths"], self.num_slots(state)
        hidden = state["hidden"][:, None]
        visible = lengths.new_zeros((len(lengths), 1, max(tree.scratch_slots, 1)), dtype=torch.bool)
        used = 0

        def expand(tokens: Tensor, parent_index: Tensor, depth: int) -> Tensor:
            nonlocal hidden, visible, used
            scratch = torch.arange(visible.shape[-1], device=tokens.device)
            new_nodes = used + torch.arange(tokens.shape[1], device=tokens.device)
            parents = parent_index[:, :, None].expand(-1, -1, visible.shape[-1])
            visible = gather_mask(visible, 1, parents)
            visible = visible | (scratch == new_nodes[:, None])
            hidden = hidden.gather(1, parent_index[:, :, None].expand(-1, -1, hidden.shape[-1]))
            cache_pass = CachePass(
                # The root's children, at depth 1, take the first position after the known tokens.
                positions=(lengths + depth - 1)[:, None].expand_as(tokens),
                slots=(lengths[:, None] + new_nodes).clamp_max(slots - 1),
                mask=tree_mask(lengths, visible, slots),
            )
            hidden = self.forward_step(state, tokens, hidden, cache_pass)
            used += tokens.shape[1]
            return self.logits(hidden)

        first = self.logits(hidden)[:, 0]
        return grow(tree, sampler, first, expand, kept_ids=self.kept_ids, vocab_size=self.target_vocab)


def new_layer_state(config: Any, weight: Tensor, batch: int, slots: int) -> DraftState:
    """Return the empty cache of one Llama layer, with the dtype and device of `weight`."""
    # the last slot is the garbage slot
    shape = (batch, config.num_key_value_heads, slots + 1, config.head_dim)
    return {
        "keys": weight.new_zeros(shape),
        "values": weight.new_zeros(shape),
        "lengths": weight.new_zeros(batch, dtype=torch.int64),
        "hidden": weight.new_zeros(batch, config.hidden_size),
    }


def attend_cached(
    state: DraftState,
    query: Float[Tensor, "b h t d"],
    key: Float[Tensor, "b kv t d"],
    value: Float[Tensor, "b kv t d"],
    *,
    cache_pass: CachePass,
) -> Float[Tensor, "b h t d"]:
    """Write keys and values into the cache, and return the attention to it."""
    index = slot_index(state["keys"], cache_pass.slots)
    state["keys"][index], state["values"][index] = key, value
    return attend(query, state["keys"], state["values"], cache_pass.mask)
