"""Operators that every compiler has equal the plain forms, which not every compiler has."""

import pytest
import torch

from models import operators
from models.operators import DROPPED_SCORE, drop_tail, mark_tokens, topk_rows
from models.trees.sampling import History
from scripts.benchmarks.operators import drop_tail_by_sort, mark_paths, mark_paths_by_product, mark_tokens_by_counts
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
def test_groups_of_groups_and_columns_that_no_group_has_have_the_same_top(case, columns, monkeypatch):
    monkeypatch.setattr(operators, "MAX_TOPK_COLUMNS", 32)
    scores = draw_scores(case, columns, rows=5)
    if case == "NaN":
        scores[:, ::7] = torch.nan
    check_top(scores, range(1, 18))
    check_top(scores.view(5, 1, columns), [5])
    widths = []
    with WatchedOperators(lambda func, args, _: func is torch.ops.aten.topk.default and widths.append(args[0].shape)):
        topk_rows(scores, 15)
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


def drop_to_infinity(scores, mass):
    kept = drop_tail(scores, mass)
    return kept.masked_fill(kept == DROPPED_SCORE, -torch.inf)


MASSES = [1e-7, 1e-3, 0.1, 0.5, 0.99, 1 - 1e-7]  # 1 - top_p


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_the_dropped_tail_is_the_start_of_a_stable_sort(case, columns):
    """Its length is that of sums in fp64, up to 1e-6; where no sum is closer to the bound, it is the plain form's."""
    scores = draw_scores(case, columns)
    order = scores.sort(dim=-1, stable=True).indices
    sums = scores.gather(-1, order).double().softmax(-1).cumsum(-1)
    for mass in MASSES:
        kept = drop_to_infinity(scores, mass)
        assert torch.equal(kept[kept > -torch.inf], scores[kept > -torch.inf])
        is_dropped = (kept == -torch.inf).gather(-1, order)
        is_dropped |= scores.gather(-1, order) == -torch.inf
        assert (is_dropped.int().diff() <= 0).all()
        assert not is_dropped[:, -1].any()
        assert (sums[is_dropped] <= mass + 1e-6).all()
        assert (sums[:, :-1][~is_dropped[:, :-1]] > mass - 1e-6).all()
        is_clear = (sums - mass).abs().amin(-1) > 1e-6
        expected = drop_tail_by_sort(scores.double(), mass, stable=True).float()
        assert torch.equal(kept[is_clear], expected[is_clear])


def test_the_tail_of_equal_scores_starts_with_the_first():
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]]).log()  # of probabilities in eighths
    for dropped, mass in enumerate([0.12, 0.13, 0.26, 0.38, 0.51, 0.76, 1.0]):
        kept = (drop_to_infinity(scores, mass) > -torch.inf)[0].tolist()
        order = [0, 2, 4, 5, 1, 3][: min(dropped, 5)]
        assert kept == [place not in order for place in range(6)]


def test_rows_without_probabilities_lose_no_highest_score():
    scores = draw_scores("normal", 100)
    scores[0, 7], scores[1, 7], scores[2] = torch.nan, torch.inf, -torch.inf
    kept = drop_tail(scores, 0.3)
    torch.testing.assert_close(kept[0], scores[0], rtol=0, atol=0, equal_nan=True)
    assert kept[1].argmax() == 7
    assert torch.equal(kept[2], scores[2])


@pytest.mark.parametrize("vocab", WIDTHS)
def test_marked_tokens_are_those_that_counts_find(vocab):
    numbers = torch.Generator().manual_seed(vocab)
    ids = torch.randint(vocab, (3, 60), generator=numbers)
    ids[:, ::3] = 0  # also the id of padding
    lengths = torch.tensor([0, 1, 50])
    is_counted = torch.arange(60) < lengths[:, None]
    expected = mark_tokens_by_counts(ids, is_counted, vocab)
    assert torch.equal(mark_tokens(ids, is_counted, vocab), expected)
    history = History.from_prompts(ids, lengths, vocab)
    assert torch.equal(history.in_text, expected)
    assert not history.in_answer.any()
    nodes, ancestors = ids[:, :5], torch.rand(3, 5, 5, generator=numbers) < 0.5
    assert torch.equal(mark_paths(nodes, ancestors, vocab), mark_paths_by_product(nodes, ancestors, vocab))
