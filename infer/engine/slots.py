"""Tensors of a decoder's slots: allocated, filled with idle rows, overwritten by prefilled rows."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
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
    return target.new_cache(batch, slots), _state_to_device(state, target.device.torch_device)


def empty_like(rows: Any, batch: int) -> Any:
    """Return `rows` with each tensor replaced by zeros for `batch` rows."""
    if isinstance(rows, Tensor):
        return rows.new_zeros(batch, *rows.shape[1:])
    if isinstance(rows, tuple):
        return tuple(empty_like(part, batch) for part in rows)
    if is_dataclass(rows) and not isinstance(rows, type):
        return replace(
            rows, **{f.name: empty_like(getattr(rows, f.name), batch) for f in fields(rows)}
        )
    return rows


def scatter_rows(state: Any, rows: Any, slots: Int[Tensor, " rows"]) -> Any:
    """Return `state` with `rows` written to `slots` in every tensor, however nested."""
    if isinstance(state, Tensor):
        return state.index_copy(0, slots, rows)
    if isinstance(state, StaticCache):  # in place, because it is by far the largest
        state.scatter_rows(rows, slots)
        return state
    if is_dataclass(state) and not isinstance(state, type):
        parts = {f.name: scatter_rows(getattr(state, f.name), getattr(rows, f.name), slots)
                 for f in fields(state)}  # fmt: skip
        return replace(state, **parts)
    if isinstance(state, dict):
        return {name: scatter_rows(part, rows[name], slots) for name, part in state.items()}
    return state


def _state_to_device(state: Any, device: torch.device) -> Any:
    """Move a draft's state to `device`: a draft without weights allocates it on the host."""
    if isinstance(state, dict):
        return {name: _state_to_device(part, device) for name, part in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state
