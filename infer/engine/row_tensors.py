"""Tensors with one entry per row, however nested: allocated, filled with zeros, written row by row.

The functions are compiled on lazy devices, and their graphs have the names of the functions.
"""

from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from models.drafts.base import Draft, DraftState
from models.targets.cache import StaticCache
from models.targets.language_model import LanguageModel


def allocate_slots(
    target: LanguageModel, draft: Draft | None, batch: int, slots: int
) -> tuple[StaticCache, DraftState]:
    """Allocate the target's cache and the draft's state, empty without one, for `batch` rows of `slots` tokens."""
    state = draft.new_state(batch, slots) if draft else {}
    device = target.device.torch_device
    # A draft without weights allocates its state on the host; for other drafts, nothing moves.
    state = tree_map_only(Tensor, lambda tensor: tensor.to(device), state)
    return target.new_cache(batch, slots), state


def make_contiguous(rows: Any) -> Any:
    """Return `rows` with every tensor contiguous, however nested; copy those that are views.

    Strides are part of a graph's shape. What a graph reads comes from several functions, whose
    results have equal strides only if all are contiguous.
    """
    return tree_map_only(Tensor, Tensor.contiguous, rows)


def empty_like(rows: Any, batch: int) -> Any:
    """Return `rows` with each tensor replaced by zeros for `batch` rows."""
    return tree_map_only(Tensor, lambda tensor: tensor.new_zeros(batch, *tensor.shape[1:]), rows)


def scatter_rows(state: Any, rows: Any, row_numbers: Int[Tensor, " rows"]) -> Any:
    """Return `state` with `rows` at `row_numbers`; tensors are copied, caches are changed in place."""

    def write_rows(stored: Any, new: Any) -> Any:
        if isinstance(stored, Tensor):
            return stored.index_copy(0, row_numbers, new)
        if isinstance(stored, StaticCache):  # in place, because it is by far the largest
            stored.scatter_rows(new, row_numbers)
        return stored

    return tree_map(write_rows, state, rows)


def repeat_row(row: Any, batch: int) -> Any:
    """Return a copy of a state of one row, however nested, with `batch` rows that are equal."""

    def repeat(stored: Any) -> Any:
        if isinstance(stored, StaticCache):
            return stored.repeat_row(batch)
        return stored.repeat(batch, *[1] * (stored.ndim - 1))

    return tree_map(repeat, row)


def list_tensors(state: Any) -> list[Tensor]:
    """Return all tensors in nested dictionaries, lists and caches."""
    parts = [leaf.keys + leaf.values if isinstance(leaf, StaticCache) else leaf for leaf in tree_leaves(state)]
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)]


def tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in nested dictionaries, lists and caches.

    >>> import torch
    >>> tensor_bytes({"lengths": torch.zeros(2, dtype=torch.int64), "keys": [torch.zeros(3)]})
    28
    """
    return sum(tensor.nbytes for tensor in list_tensors(state))
