"""Operators of decoding, by those that every accelerator's compiler has.

Some compilers have no sort, no top-k of wide rows or of more than two dimensions, no remainder or
argmax of integers, and no gather of bools; `tests/models/test_operations.py` keeps these out of our
graphs.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

MAX_TOPK_COLUMNS = 16_384  # of a row of one top-k


def gather_mask(mask: Bool[Tensor, "*source"], dim: int, index: Int[Tensor, "*result"]) -> Bool[Tensor, "*result"]:
    """Return `mask.gather(dim, index)`."""
    return mask.int().gather(dim, index).bool()


def topk_rows(
    values: Float[Tensor, "*rows columns"], count: int
) -> tuple[Float[Tensor, "*rows count"], Int[Tensor, "*rows count"]]:
    """Return the largest `count` values of each row, in descending order, and their indices.

    As in `torch.topk`, NaN counts as the largest value, and it is not defined which of equal values
    are taken. A count above half of MAX_TOPK_COLUMNS is taken from whole rows, however wide they are.
    """
    top, index = _topk_matrix(values.reshape(-1, values.shape[-1]), count)
    shape = (*values.shape[:-1], count)
    return top.view(shape), index.view(shape)


def _topk_matrix(
    values: Float[Tensor, "rows columns"], count: int
) -> tuple[Float[Tensor, "rows count"], Int[Tensor, "rows count"]]:
    """Return the top of a matrix: that of the `count` groups of columns whose highest values are the largest."""
    num_rows, columns = values.shape
    if columns <= MAX_TOPK_COLUMNS or count > MAX_TOPK_COLUMNS // 2:
        return values.topk(count, dim=-1)
    width = 2 ** max(1, round(math.log2(columns / count) / 2))  # so that groups and candidates are about as many
    padded = values
    if padding := -columns % width:
        # The clamp lets a column of -inf come before the padding, which the result must not hold.
        lowest = torch.finfo(values.dtype).min
        padded = pad(values.clamp_min(lowest / 2), (0, padding), value=lowest)
    groups = padded.reshape(num_rows, -1, width)
    group = _topk_matrix(groups.amax(-1), count)[1]
    first_group = groups.shape[1] * torch.arange(num_rows, device=values.device)
    candidates = groups.flatten(0, 1)[first_group[:, None] + group].flatten(1)
    column = (width * group[:, :, None] + torch.arange(width, device=values.device)).flatten(1)
    top, place = _topk_matrix(candidates, count)
    index = column.gather(1, place)
    return (values.gather(1, index) if padding else top), index


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
