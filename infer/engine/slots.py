"""Room for the rows of a decoder: made, filled with idle rows, given some that have begun."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from models.drafts.base import Draft, State
from models.target.cache import StaticCache
from models.target.language_model import Transformer


def room(
    target: Transformer, draft: Draft | None, batch: int, slots: int
) -> tuple[StaticCache, State]:
    """What target and draft keep of `batch` rows of `slots` tokens."""
    state = draft.new_state(batch, slots) if draft else {}
    return target.new_cache(batch, slots), _to(state, target.device.torch_device)


def blank(one: Any, batch: int) -> Any:
    """Zeros for each tensor of a row, for so many rows."""
    if isinstance(one, Tensor):
        return one.new_zeros(batch, *one.shape[1:])
    if isinstance(one, tuple):
        return tuple(blank(part, batch) for part in one)
    if is_dataclass(one) and not isinstance(one, type):
        return replace(one, **{f.name: blank(getattr(one, f.name), batch) for f in fields(one)})
    return one


def put(whole: Any, some: Any, slots: Int[Tensor, " some"]) -> Any:
    """`whole` with the rows of `some` in these slots, whatever the two are made of."""
    if isinstance(whole, Tensor):
        return whole.index_copy(0, slots, some)
    if isinstance(whole, StaticCache):  # in place: it is the largest thing there is
        whole.put(some, slots)
        return whole
    if is_dataclass(whole) and not isinstance(whole, type):
        parts = {f.name: put(getattr(whole, f.name), getattr(some, f.name), slots)
                 for f in fields(whole)}  # fmt: skip
        return replace(whole, **parts)
    if isinstance(whole, dict):
        return {name: put(part, some[name], slots) for name, part in whole.items()}
    return whole


def _to(state: Any, place: torch.device) -> Any:
    """A draft's state on the device, also of a draft that has no weights to stand there."""
    if isinstance(state, dict):
        return {name: _to(part, place) for name, part in state.items()}
    return state.to(place) if isinstance(state, Tensor) else state
