"""Static key-value cache of a language model: write to any slots, keep one path of a tree.

    slots:  [ committed 0 .. length-1 | scratch length .. length+nodes | free ...  | garbage ]

A pass may read a view of the first slots, as far as its rows are filled.

Layers with a sliding window keep every key too, and mask those that have left the window: this is
simple and exact, and costs memory. See docs/decoding.md.

Axes: B rows, H key-value heads, S slots, T new tokens, D head size.
"""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.device.graph_budget import mark_any_size
from models.operators import gather_mask

# keys, values and slots of one layer, then source and destination of moves if there are any
LayerArgs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class CacheMoves:
    """The slots of the nodes that a round accepted, and the slots that they move to.

    There are `Tree.max_path_length` moves a row; rows with fewer move their first slot to itself.
    """

    source: Int[Tensor, "batch moves"]
    destination: Int[Tensor, "batch moves"]

    def of(self, rows: Bool[Tensor, " batch"]) -> "CacheMoves":
        """Return the moves of these rows; the others move nothing."""
        source, destination = (torch.where(rows[:, None], slots, 0) for slots in (self.source, self.destination))
        return CacheMoves(source=source, destination=destination)


@dataclass(frozen=True, kw_only=True)
class CacheWrite:
    """The slots where one pass writes its keys and values, and the moves that it makes first.

    It moves the path of the tree that the previous round accepted. The move is part of each layer's
    single graph, which avoids hundreds of separate operations on the caches of all layers.
    """

    slots: Int[Tensor, "batch new"]
    moves: CacheMoves | None = None  # None, not empty: not every compiler takes tensors of size zero


class StaticCache:
    """Keys and values of all layers, whose write position differs from row to row."""

    def __init__(self, layers: int, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device):
        """Allocate rows of zeros; `shape` is batch, key-value heads, slots without the garbage slot, head size."""
        batch, heads, slots, head_size = shape
        shape = (batch, heads, slots + 1, head_size)  # the last is the garbage slot
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        # of the tokens in the slots; only targets with sliding windows record and read them
        self.positions = torch.zeros((batch, slots + 1), dtype=torch.int64, device=device)
        self.allocated_slots = slots + 1  # also of a view of the first slots, whose strides depend on it
        self.any_length = False  # whether one graph serves views of all lengths
        self._fixed_slots = slots + 1

    @property
    def batch(self) -> int:
        return len(self.positions)

    @property
    def num_slots(self) -> int:
        """Return the slots of a row, the garbage slot included; of a view, its own."""
        # An attribute tells a graph's guards the number, a shape does not: see FROZEN_PREFIXES of session.py.
        return self.keys[0].shape[2] if self.any_length else self._fixed_slots

    @property
    def graph_key(self) -> str:
        """Return what graphs depend on (see models/device/graph_budget.py)."""
        slots = f"any of {self.allocated_slots}" if self.any_length else self.num_slots
        return f"{self.batch} rows of {slots} slots, {self.keys[0].dtype}"

    def record_positions(self, positions: Int[Tensor, "batch new"], write: CacheWrite) -> Int[Tensor, "batch slots"]:
        """Record the positions of new tokens and return those of all slots.

        Call it once per pass of a target with windows, with the `write` of its keys. Positions of
        empty slots are arbitrary.
        """
        row = torch.arange(len(positions), device=positions.device)[:, None]
        if write.moves is not None:
            moved = self.positions[row, write.moves.source]
            self.positions[row, write.moves.destination] = moved
        self.positions[row, write.slots] = positions
        return self.positions

    def layer_args(self, i: int, write: CacheWrite) -> LayerArgs:
        """Return what `write_layer` takes of layer `i`."""
        moves = () if write.moves is None else (write.moves.source, write.moves.destination)
        return self.keys[i], self.values[i], write.slots, *moves

    def move(self, moves: CacheMoves) -> None:
        """Move slots at once, as a CacheWrite would do on the next pass."""
        source, destination = moves.source, moves.destination
        for stored in (*self.keys, *self.values):
            stored[slot_index(stored, destination)] = stored[slot_index(stored, source)]
        row = torch.arange(len(source), device=source.device)[:, None]
        self.positions[row, destination] = self.positions[row, source]

    def scatter_rows(self, other: "StaticCache", rows: Int[Tensor, " rows"]) -> None:
        """Overwrite these rows with the rows of `other`, in the same order."""
        theirs = (*other.keys, *other.values, other.positions)
        for tensor, other_tensor in zip((*self.keys, *self.values, self.positions), theirs, strict=True):
            tensor.index_copy_(0, rows, other_tensor)

    def first_slots(self, count: int, *, any_length: bool = False) -> "StaticCache":
        """Return a view of the first `count` slots, for passes that neither read nor write more.

        With `any_length` a compiled function has one graph for the views of all lengths.
        """
        view = copy.copy(self)
        view.keys = [keys[:, :, :count] for keys in self.keys]
        view.values = [values[:, :, :count] for values in self.values]
        view.positions = self.positions[:, :count]
        view._fixed_slots, view.any_length = count, any_length
        if any_length:
            # Otherwise a graph would take the strides of its slots for a function of their number.
            assert count < self.allocated_slots
            for tensor in (*view.keys, *view.values):
                mark_any_size(tensor, 2)
            mark_any_size(view.positions, 1)
        return view

    def repeat_row(self, batch: int) -> "StaticCache":
        """Return a copy of a cache of one row with `batch` rows that are equal."""
        repeated = copy.copy(self)
        repeated.keys = [keys.repeat(batch, 1, 1, 1) for keys in self.keys]
        repeated.values = [values.repeat(batch, 1, 1, 1) for values in self.values]
        repeated.positions = self.positions.repeat(batch, 1)
        return repeated


def write_layer(
    args: LayerArgs, new_keys: Float[Tensor, "b h t d"], new_values: Float[Tensor, "b h t d"]
) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:
    """Move the accepted path, write the new keys and values, and return every slot."""
    keys, values, slots, *moves = args
    if moves:
        old, new = (slot_index(keys, moved) for moved in moves)
        keys[new], values[new] = keys[old], values[old]
    index = slot_index(keys, slots)
    keys[index], values[index] = new_keys, new_values
    return keys, values


def slot_index(stored: Float[Tensor, "b h s d"], slots: Int[Tensor, "b t"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return an index of `slots` in every head.

    Inductor writes through it in place, whereas it would copy the whole cache for a scatter.
    """
    rows = torch.arange(stored.shape[0], device=stored.device)[:, None, None]
    heads = torch.arange(stored.shape[1], device=stored.device)[None, :, None]
    return rows, heads, slots[:, None, :]


def tree_mask(
    lengths: Int[Tensor, " batch"], visible: Bool[Tensor, "batch new scratch"], slots: int
) -> Bool[Tensor, "batch 1 new slots"]:
    """Return a mask of the slots that new tokens attend to: committed ones and `visible` nodes.

    >>> chain = torch.tensor([[[True, False], [True, True]]])
    >>> tree_mask(torch.tensor([3]), chain, 6).int()[0, 0]
    tensor([[1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 0]], dtype=torch.int32)
    """
    # the node that each slot holds; negative for committed tokens
    node = torch.arange(slots, device=lengths.device)[None, :] - lengths[:, None]
    new, scratch = visible.shape[1:]
    index = node.clamp(0, scratch - 1)[:, None, :].expand(-1, new, -1)
    node_mask = gather_mask(visible, 2, index) & ((node >= 0) & (node < scratch))[:, None, :]
    return ((node < 0)[:, None, :] | node_mask)[:, None]


def prompt_mask(lengths: Int[Tensor, " batch"], new: int, slots: int) -> Bool[Tensor, "batch 1 new slots"]:
    """Return a causal mask over the first `new` slots, the same for all rows.

    Padding follows a row's last token, so that no token of the row attends to it.
    """
    query = torch.arange(new, device=lengths.device)[:, None]
    slot = torch.arange(slots, device=lengths.device)[None, :]
    return (slot <= query)[None, None].expand(len(lengths), 1, new, slots)
