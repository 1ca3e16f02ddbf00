"""Operators of decoding, by those that every accelerator's compiler has.

Some compilers have no sort, no top-k of more than two dimensions, no remainder or argmax of
integers, and no gather of bools; `tests/models/test_operations.py` keeps these out of our graphs.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def gather_mask(mask: Bool[Tensor, "*source"], dim: int, index: Int[Tensor, "*result"]) -> Bool[Tensor, "*result"]:
    """Return `mask.gather(dim, index)`."""
    return mask.int().gather(dim, index).bool()


def topk_rows(
    values: Float[Tensor, "*rows columns"], count: int
) -> tuple[Float[Tensor, "*rows count"], Int[Tensor, "*rows count"]]:
    """Return the largest `count` values of each row, in descending order, and their indices."""
    top, index = values.reshape(-1, values.shape[-1]).topk(count, dim=-1)
    shape = (*values.shape[:-1], count)
    return top.view(shape), index.view(shape)


def stable_topk(
    values: Float[Tensor, "batch columns"], count: int
) -> tuple[Float[Tensor, "batch count"], Int[Tensor, "batch count"]]:
    """Return the values and indices of the top `count`: by value, of equal ones the earlier.

    It is the start of a stable sort, by comparison of every pair: for rows of some hundred values.
    NaN counts as the largest value, as in a sort.

    >>> stable_topk(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 3)
    (tensor([[3., 3., 2.]]), tensor([[1, 2, 3]]))
    """
    place = torch.arange(values.shape[1], device=values.device)
    key = torch.where(values.isnan(), torch.finfo(values.dtype).max, values)
    other, own = key[:, None, :], key[:, :, None]
    is_earlier = place[None, :] < place[:, None]
    is_ahead = (other > own) | (is_earlier & (other == own))
    rank = is_ahead.sum(-1, dtype=torch.int32).long()
    index = torch.zeros_like(rank).scatter(1, rank, place.expand_as(rank))[:, :count]
    return values.gather(1, index), index
