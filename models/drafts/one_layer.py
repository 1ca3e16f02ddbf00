"""One decoder layer that drafts from the target's features: what the EAGLE methods share.

    row t:   a feature of position t, embedding of token t+1   ->   token t+2
    step i:  the same row, fed its own output and the embedding of token t+1+i -> token t+2+i

Axes: B rows, T tokens, W tree nodes expanded at once, H hidden.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models.cache import places, prompt_mask, tree_mask
from models.drafts.base import Batch, State
from models.drafts.feature import FeatureDraft
from models.layers import attend, attend_unrolled
from models.sampling import SamplingRule
from models.supervision import sooner
from models.transformer import Seen
from models.tree import Proposal, Tree, grow


class OneLayerDraft(FeatureDraft):
    """A method says what enters the layer and what reads its output; the rest is here."""

    embed_tokens: nn.Embedding
    rotary: nn.Module

    def features(self, seen: Seen) -> Float[Tensor, "b t h"]:
        """What the layer takes from the target."""
        raise NotImplementedError

    def enter(
        self, embedded: Float[Tensor, "b t h"], hidden: Float[Tensor, "b t h"],
        turn: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """The residual stream that enters the layer, and its queries, keys and values."""
        raise NotImplementedError

    def finish(
        self, stream: Float[Tensor, "b t h"], attended: Float[Tensor, "b heads t d"]
    ) -> Float[Tensor, "b t h"]:
        """The rest of the layer: its output is the feature of the next step."""
        raise NotImplementedError

    def logits(self, hidden: Float[Tensor, "b t h"]) -> Float[Tensor, "b t draft_vocab"]:
        raise NotImplementedError

    def target_ids(self, tokens: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Of ids of the draft's own vocabulary."""
        return tokens

    # --- training ---------------------------------------------------------------------------

    def unroll(
        self, batch: Batch, hidden: Float[Tensor, "b t h"], *, carries: bool
    ) -> list[Float[Tensor, "b t h"]]:
        """The layer's output at each of the steps that decoding performs.

        `carries` lets gradients flow from a step into the steps that fed it.
        """
        embedded, mask = self.embed_tokens(batch.ids), batch.attends()
        keys, values, outputs = [], [], []
        for i in range(self.trained_depth):
            turn = self.rotary(hidden, batch.positions + i)
            stream, query, key, value = self.enter(sooner(embedded, 1 + i), hidden, turn)
            keys.append(key)
            values.append(value)
            outputs.append(self.finish(stream, attend_unrolled(query, keys, values, mask)))
            hidden = outputs[-1] if carries else outputs[-1].detach()
        return outputs

    # --- decoding ---------------------------------------------------------------------------

    def new_state(self, batch: int, slots: int) -> State:
        weight = self.embed_tokens.weight
        groups, size = self.config.num_key_value_heads, self.config.head_dim
        shape = (batch, groups, slots + 1, size)  # one more: the garbage slot
        return {
            "keys": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "values": torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            "lengths": torch.zeros(batch, dtype=torch.int64, device=weight.device),
            "hidden": weight.new_zeros(batch, self.config.hidden_size),
        }

    def start(
        self, state: State, ids: Int[Tensor, "b prompt"], *, lengths: Int[Tensor, " b"],
        first: Int[Tensor, " b"], seen: Seen,
    ) -> State:  # fmt: skip
        last = torch.arange(ids.shape[1], device=ids.device) == (lengths - 1)[:, None]
        tokens = torch.where(last, first[:, None], sooner(ids, 1))
        count, slots = ids.shape[1], state["keys"].shape[2]
        rows = torch.arange(count, device=ids.device).expand_as(ids)
        return self._read(
            state | {"lengths": torch.zeros_like(lengths)}, tokens, seen,
            rows=rows, mask=prompt_mask(lengths, count, slots), count=lengths,
        )  # fmt: skip

    def advance(
        self, state: State, ids: Int[Tensor, "b path"], *, count: Int[Tensor, " b"], seen: Seen
    ) -> State:
        lengths, slots = state["lengths"], state["keys"].shape[2]
        new = torch.arange(ids.shape[1], device=ids.device)
        causal = (new <= new[:, None]).expand(len(ids), -1, -1)
        rows = lengths[:, None] + new
        mask = tree_mask(lengths, causal, slots)
        return self._read(state, ids, seen, rows=rows, mask=mask, count=count)

    def _read(
        self, state: State, tokens: Int[Tensor, "b t"], seen: Seen, *, rows: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b 1 t s"], count: Int[Tensor, " b"],
    ) -> State:  # fmt: skip
        """Rows with true features; `count` of them are kept, the rest is written over later."""
        # a row that has ended may stand at the last slots: what does not fit goes to garbage
        slots = rows.clamp_max(mask.shape[-1] - 1)
        hidden = self._layer(
            state, tokens, self.features(seen), positions=rows, slots=slots, mask=mask
        )
        last = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        kept = (count > 0)[:, None]  # rows without work keep what they had
        return state | {
            "lengths": state["lengths"] + count,
            "hidden": torch.where(kept, hidden.gather(1, last)[:, 0], state["hidden"]),
        }

    def propose(
        self, state: State, *, tree: Tree, rule: SamplingRule, noise: Tensor | None
    ) -> Proposal:
        lengths, slots = state["lengths"], state["keys"].shape[2]
        kept = self.kept_ids
        hidden = state["hidden"][:, None]
        sees = lengths.new_zeros((len(lengths), 1, max(tree.scratch, 1)), dtype=torch.bool)
        used = level = 0

        def scores(hidden: Tensor, level: int) -> Tensor:
            logits = self.logits(hidden)
            if noise is None:
                return rule.scores(logits, None)
            here = noise[:, level] if kept is None else noise[:, level, kept]
            return rule.scores(logits, here[:, None].expand_as(logits))

        def expand(tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal hidden, sees, used, level
            ids = self.target_ids(tokens)
            own = torch.arange(sees.shape[-1], device=ids.device)
            new = used + torch.arange(ids.shape[1], device=ids.device)
            sees = sees.gather(1, above[:, :, None].expand(-1, -1, sees.shape[-1]))
            sees = sees | (own == new[:, None])
            hidden = hidden.gather(1, above[:, :, None].expand(-1, -1, hidden.shape[-1]))
            hidden = self._layer(
                state, ids, hidden,
                positions=(lengths + level)[:, None].expand_as(ids),
                slots=(lengths[:, None] + new).clamp_max(slots - 1),
                mask=tree_mask(lengths, sees, slots),
            )  # fmt: skip
            used, level = used + ids.shape[1], level + 1
            return scores(hidden, level)

        grown = grow(tree, scores(hidden, 0)[:, 0], expand)
        return Proposal(ids=self.target_ids(grown.ids), parents=grown.parents)

    def _layer(
        self, state: State, tokens: Int[Tensor, "b t"], hidden: Float[Tensor, "b t h"], *,
        positions: Int[Tensor, "b t"], slots: Int[Tensor, "b t"], mask: Bool[Tensor, "b 1 t s"],
    ) -> Float[Tensor, "b t h"]:  # fmt: skip
        """The layer over cached keys: writes at `slots`, reads through `mask`."""
        turn = self.rotary(hidden, positions)
        stream, query, key, value = self.enter(self.embed_tokens(tokens), hidden, turn)
        where = places(state["keys"], slots)
        state["keys"][where], state["values"][where] = key, value
        attended = attend(query, state["keys"], state["values"], mask)
        return self.finish(stream, attended)
