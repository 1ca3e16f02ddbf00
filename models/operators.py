"""Operators of losses and of decoding, by those that every accelerator's compiler has.

Some compilers have no sort, no top-k of wide rows or of more than two dimensions, no remainder or argmax of integers,
no gather of bools and no scatter that adds integers; `tests/models/test_operations.py` keeps these out of our graphs.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

MAX_TOPK_COLUMNS = 16_384  # of a row of one top-k
# Of a bisection of scores below the highest: e^-32 is 1e-14, and fp32 holds multiples of 2^(5 - 24) up to 2^5.
SCORE_RANGE, SCORE_BITS = 32.0, 24
# Of a token that is never sampled. Its probability is exactly 0, as with -inf, which not every compiler computes with.
DROPPED_SCORE = -1e9


def gather_mask(mask: Bool[Tensor, "*source"], dim: int, index: Int[Tensor, "*result"]) -> Bool[Tensor, "*result"]:
    """Return `mask.gather(dim, index)`."""
    return mask.int().gather(dim, index).bool()


def topk_rows(
    values: Float[Tensor, "*rows columns"], count: int
) -> tuple[Float[Tensor, "*rows count"], Int[Tensor, "*rows count"]]:
    """Return the largest `count` values of each row, in descending order, and their indices.

    As in `torch.topk`, NaN counts as the largest value, and it is not defined which of equal values
    are taken. A count of half of MAX_TOPK_COLUMNS and more is taken from whole rows, however wide they are.
    """
    top, index = _topk_matrix(values.reshape(-1, values.shape[-1]), count)
    shape = (*values.shape[:-1], count)
    return top.view(shape), index.view(shape)


def _topk_matrix(
    values: Float[Tensor, "rows columns"], count: int
) -> tuple[Float[Tensor, "rows count"], Int[Tensor, "rows count"]]:
    """Return the top of a matrix: that of the `count` groups of columns whose highest values are the largest.

    Columns that are left over join them.
    """
    columns = values.shape[1]
    if columns <= MAX_TOPK_COLUMNS or 2 * count >= MAX_TOPK_COLUMNS:
        return values.topk(count, dim=-1)
    # Candidates are up to three times as many as groups, because maxima of narrow groups are slow on a CPU. A power
    # of two up to 128 divides most vocabularies.
    width = 2 ** min(int(math.log2(3 * columns / count) / 2), 7)
    end = columns - columns % width  # of the groups
    groups = values[:, :end].unflatten(1, (-1, width))
    group = _topk_matrix(groups.amax(-1), count)[1]
    row = torch.arange(len(values), device=values.device)[:, None]
    candidates = groups[row, group].flatten(1)
    column = (width * group[:, :, None] + torch.arange(width, device=values.device)).flatten(1)
    if end < columns:
        rest = torch.arange(end, columns, device=values.device).expand(len(values), -1)
        candidates, column = torch.cat([candidates, values[:, end:]], 1), torch.cat([column, rest], 1)
    top, place = _topk_matrix(candidates, count)
    return top, column.gather(1, place)


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


def mark_tokens(
    ids: Int[Tensor, "*rows places"], is_counted: Bool[Tensor, "*rows places"], vocab: int
) -> Bool[Tensor, "*rows vocab"]:
    """Return which tokens of the vocabulary are among the counted ids of each row."""
    counts = torch.zeros((*ids.shape[:-1], vocab), dtype=torch.float32, device=ids.device)
    # As integers, because Inductor writes the mask of a comparison of floats more slowly.
    return counts.scatter_add(-1, ids, is_counted.float()).int() > 0


def drop_tail(scores: Float[Tensor, "*rows vocab"], mass: float) -> Float[Tensor, "*rows vocab"]:
    """Return scores with DROPPED_SCORE for the least likely tokens: as many as have at most `mass` of the probability.

    Of equal scores the earlier ones go first, and the last of the highest always stays. A stable
    sort and a cumulative sum give the same, unless the sum comes as close to `mass` as it is
    rounded. Scores less than 2^-19 apart may count as equal.
    """
    shifted = scores - scores.amax(-1, keepdim=True)
    # Not a softmax: that of PyTorch adds a wide row one by one, and sums to 1 with an error of 2e-5.
    weights = shifted.exp()
    limit = mass * weights.sum(-1, keepdim=True)

    def sum_up_to(bound: Tensor) -> Tensor:
        return torch.where(shifted <= bound, weights, 0.0).sum(-1, keepdim=True)

    # A bisection for the highest bound up to which all tokens go. Its steps are exact in fp32.
    low, width = torch.full_like(limit, -SCORE_RANGE), SCORE_RANGE
    for _ in range(SCORE_BITS):
        width /= 2
        low = torch.where(sum_up_to(low + width) <= limit, low + width, low)
    # Of the tokens with the next score the first ones go, as far as the limit allows.
    is_next = (shifted > low) & (shifted <= low + width)
    sums = _add_up(torch.where(is_next, weights, 0.0))
    place = torch.arange(scores.shape[-1], dtype=torch.float32, device=scores.device)
    is_before_last = place < torch.where(is_next, place, -1.0).amax(-1, keepdim=True)
    goes = (shifted <= low) | (is_next & (sums <= limit - sum_up_to(low)) & is_before_last)
    return scores.masked_fill(goes, DROPPED_SCORE)


def _add_up(values: Float[Tensor, "*rows columns"]) -> Float[Tensor, "*rows columns"]:
    """Return the cumulative sums of rows, by those of short parts, as that of a wide row is slow on accelerators."""
    columns, width = values.shape[-1], 128
    parts = pad(values, (0, -columns % width)).unflatten(-1, (-1, width)).cumsum(-1)
    totals = parts[..., -1]
    return (parts + (totals.cumsum(-1) - totals)[..., None]).flatten(-2)[..., :columns]
