"""Static key-value cache of the target: append at given slots, roll back, keep one path of a tree.

    slots:  [ committed 0 .. length-1 | scratch length .. length+nodes | free ...  | garbage ]

The root and the nodes of a tree are written behind the committed tokens of each row, so a chain is
in place already and only the accepted path of a tree moves, at the beginning of the next pass.
Rolling back is a smaller `length`: what lies behind it is masked and written over. Rows without
work write to the garbage slot. All shapes are fixed at construction.

Layers with a sliding window keep every key too, and mask what has left the window: that is simple
and exact, and costs the memory and the reads of the keys they will not look at again.

Axes: B rows, H key-value heads, S slots, T new tokens, D head size.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True, kw_only=True)
class Write:
    """What one pass does to the keys and values of every layer: it moves some, then writes its own.

    The move is what the round before accepted of its tree. Done here, it is part of the layer's
    one graph, and not hundreds of operations on the caches of all layers.
    """

    slots: Int[Tensor, "batch new"]
    source: Int[Tensor, "batch path"]  # slots to be moved, at most the tree's depth; may be none
    goal: Int[Tensor, "batch path"]  # where to; what stays moves from garbage to garbage

    @classmethod
    def at(cls, slots: Int[Tensor, "batch new"]) -> "Write":
        """Write there, and move nothing."""
        return cls(slots=slots, source=slots[:, :0], goal=slots[:, :0])


class StaticCache(Cache):
    """A transformers Cache whose write position differs from row to row."""

    def __init__(
        self, *, layers: int, batch: int, heads: int, slots: int, head_size: int,
        dtype: torch.dtype, device: torch.device,
    ):  # fmt: skip
        self.layers = []  # transformers asks for it; our keys and values are below
        shape = (batch, heads, slots + 1, head_size)  # one more: the garbage slot
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.positions = torch.zeros((batch, slots + 1), dtype=torch.int64, device=device)
        self.garbage = slots

    @property
    def graph_key(self) -> str:
        """What graphs depend on: models/device/graph_budget.py."""
        rows, slots = self.positions.shape
        return f"{rows} rows of {slots} slots, {self.keys[0].dtype}"

    def place(
        self, positions: Int[Tensor, "batch new"], write: Write
    ) -> Int[Tensor, "batch slots"]:
        """The position of the token in each slot, once `write` is done; any where none is."""
        row = torch.arange(len(positions), device=positions.device)[:, None]
        if write.source.shape[1]:
            self.positions[row, write.goal] = self.positions[row, write.source]
        self.positions[row, write.slots] = positions
        return self.positions

    def layer(self, i: int, write: Write) -> tuple[Tensor, ...]:
        """What the LayerCache of layer `i` is made of."""
        return self.keys[i], self.values[i], write.slots, write.source, write.goal

    def move(self, source: Int[Tensor, "b path"], goal: Int[Tensor, "b path"]) -> None:
        """What `Write` would do on the next pass, at once."""
        for stored in (*self.keys, *self.values):
            stored[places(stored, goal)] = stored[places(stored, source)]
        row = torch.arange(len(source), device=source.device)[:, None]
        self.positions[row, goal] = self.positions[row, source]

    def put(self, other: "StaticCache", rows: Int[Tensor, " some"]) -> None:
        """Take the rows of another cache for these of our own."""
        mine = (*self.keys, *self.values, self.positions)
        theirs = (*other.keys, *other.values, other.positions)
        for ours, some in zip(mine, theirs, strict=True):
            ours.index_copy_(0, rows, some)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0  # positions are always given, so nothing is derived from this


class LayerCache(Cache):
    """One layer's part. It knows nothing of the others, so that all layers share one graph."""

    def __init__(
        self, keys: Float[Tensor, "b h s d"], values: Float[Tensor, "b h s d"],
        slots: Int[Tensor, "b new"], source: Int[Tensor, "b path"], goal: Int[Tensor, "b path"],
    ):  # fmt: skip
        self.layers = []
        self.keys, self.values = keys, values
        self.slots, self.source, self.goal = slots, source, goal

    def update(
        self, key_states: Float[Tensor, "b h t d"], value_states: Float[Tensor, "b h t d"],
        *_args: object, **_kwargs: object,
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:  # fmt: skip
        """Move what the last round kept, write what is new, and return every slot."""
        if self.source.shape[1]:
            source, goal = places(self.keys, self.source), places(self.keys, self.goal)
            self.keys[goal], self.values[goal] = self.keys[source], self.values[source]
        where = places(self.keys, self.slots)
        self.keys[where], self.values[where] = key_states, value_states
        return self.keys, self.values


def places(
    stored: Float[Tensor, "b h s d"], slots: Int[Tensor, "b t"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Index of `slots` in every head. Inductor writes it in place; a scatter copies everything."""
    rows = torch.arange(stored.shape[0], device=stored.device)[:, None, None]
    heads = torch.arange(stored.shape[1], device=stored.device)[None, :, None]
    return rows, heads, slots[:, None, :]


def tree_mask(
    lengths: Int[Tensor, " batch"], sees: Bool[Tensor, "batch new scratch"], slots: int
) -> Bool[Tensor, "batch 1 new slots"]:
    """Committed tokens, and of the nodes stored behind them those that a new one `sees`.

    >>> chain = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    >>> tree_mask(torch.tensor([3]), chain, 6).int()[0, 0]
    tensor([[1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 0]], dtype=torch.int32)
    """
    slot = torch.arange(slots, device=lengths.device)
    node = slot[None, :] - lengths[:, None]  # which node a slot holds
    new, scratch = sees.shape[1:]
    index = node.clamp(0, scratch - 1)[:, None, :].expand(-1, new, -1)
    seen = sees.gather(2, index) & ((node >= 0) & (node < scratch))[:, None, :]
    return ((node < 0)[:, None, :] | seen)[:, None]


def prompt_mask(
    lengths: Int[Tensor, " batch"], new: int, slots: int
) -> Bool[Tensor, "batch 1 new slots"]:
    """Causal over the first `new` slots. Padding behind a row's length is read by nothing."""
    query = torch.arange(new, device=lengths.device)[:, None]
    slot = torch.arange(slots, device=lengths.device)[None, :]
    return (slot <= query)[None, None].expand(len(lengths), 1, new, slots)
