"""Tensors with one entry a row, however nested: allocated, filled with zeros, written row by row.

The functions are compiled on lazy devices, and their graphs have the names of the functions.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from models.drafts.base import Draft, DraftState
from models.target.cache import StaticCache
from models.target.language_model import LanguageModel


def allocate_slots(
    target: LanguageModel, draft: Draft | None, batch: int, slots: int
) -> tuple[StaticCache, DraftState]:
    """Allocate the target's cache and the draft's state for `batch` rows of `slots` tokens."""
    state = draft.new_state(batch, slots) if draft else {}
    # a draft without weights allocates its state on the host
    state = _map_tensors(lambda tensor: tensor.to(target.device.torch_device), state)
    return target.new_cache(batch, slots), state


def empty_like(rows: Any, batch: int) -> Any:
    """Return `rows` with each tensor replaced by zeros for `batch` rows."""
    return _map_tensors(lambda tensor: tensor.new_zeros(batch, *tensor.shape[1:]), rows)


def scatter_rows(state: Any, rows: Any, slots: Int[Tensor, " rows"]) -> Any:
    """Return `state` with `rows` written to `slots` in every tensor, however nested."""

    def write_rows(stored: Tensor | StaticCache, new: Any) -> Tensor | StaticCache:
        if isinstance(stored, Tensor):
            return stored.index_copy(0, slots, new)
        stored.scatter_rows(new, slots)  # in place, because it is by far the largest
        return stored

    return _map_tensors(write_rows, state, rows)


def _map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call `function` with the tensors and caches at the same place of nested containers."""
    if isinstance(tree, Tensor | StaticCache):
        return function(tree, *others)
    if isinstance(tree, dict):
        return {
            name: _map_tensors(function, part, *(other[name] for other in others))
            for name, part in tree.items()
        }
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = {
            part.name: _map_tensors(
                function, getattr(tree, part.name), *(getattr(o, part.name) for o in others)
            )
            for part in fields(tree)
        }
        return replace(tree, **parts)
    return tree
