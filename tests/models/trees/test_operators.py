"""Operators that every compiler has equal the plain forms, which not every compiler has."""

import pytest
import torch

from models.trees import operators
from models.trees.operators import topk_rows
from tests.support.models.watching import WatchedOperators

WIDTHS = {100: 40, 16_384: 3, 16_385: 3, 32_000: 3, 151_936: 2}  # rows by columns
CASES = ["normal", "distinct", "ties", "adjacent", "flat", "bfloat16", "large", "forbidden", "single token", "certain"]


def draw_scores(case: str, columns: int, *, rows: int | None = None) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(columns)
    scores = 4 * torch.randn(rows or WIDTHS[columns], columns, generator=numbers)
    match case:
        case "distinct":
            order = torch.stack([torch.randperm(columns, generator=numbers) for _ in scores])
            return 20 * (order + 1).log() / torch.tensor(columns).log()
        case "ties":
            return scores.round()
        case "adjacent":
            return 1 + (8 * scores).round() * 2**-18
        case "flat":
            return scores.clamp(0, 0)
        case "bfloat16":
            return scores.bfloat16().float() / 0.7
        case "large":
            return scores * 1e9
        case "forbidden":
            scores[torch.rand(scores.shape, generator=numbers) < 0.4] = -torch.inf
        case "single token":
            scores[:, torch.arange(columns) != columns // 2] = -torch.inf
        case "certain":
            scores[:, columns // 3] = 90.0
    return scores


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_the_top_of_groups_is_the_top_of_whole_rows(case, columns):
    check_top(draw_scores(case, columns), {1, 8, 50, columns // 3, columns})


@pytest.mark.parametrize("columns", [33, 64, 97, 500, 997])
@pytest.mark.parametrize("case", [*CASES, "NaN"])
def test_groups_of_groups_and_groups_that_are_padded_have_the_same_top(case, columns, monkeypatch):
    monkeypatch.setattr(operators, "MAX_TOPK_COLUMNS", 32)
    scores = draw_scores(case, columns, rows=5)
    if case == "NaN":
        scores[:, ::7] = torch.nan
    check_top(scores, range(1, 17))
    check_top(scores.view(5, 1, columns), [5])
    widths = []
    with WatchedOperators(lambda func, args, _: func is torch.ops.aten.topk.default and widths.append(args[0].shape)):
        topk_rows(scores, 16)
    assert len(widths) > 1
    assert max(width for _, width in widths) <= 32


def check_top(scores, counts):
    for count in counts:
        top, index = topk_rows(scores, count)
        expected, expected_index = scores.topk(count)
        torch.testing.assert_close(top, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(scores.gather(-1, index), top, rtol=0, atol=0, equal_nan=True)
        assert (index.sort().values.diff() > 0).all()  # no column is taken twice
        if len(scores.unique()) == scores[0].numel():
            assert torch.equal(index, expected_index)
