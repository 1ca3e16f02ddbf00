"""Prompts that are admitted together share the passes that read the fewest padded tokens."""

import random
from itertools import combinations

from infer.engine.admission import PASS_COST, split_by_length
from infer.engine.requests import Request


def build_requests(lengths):
    return [Request(ids=[1] * n, row_id=i, max_new_tokens=1) for i, n in enumerate(lengths)]


def sum_costs(groups):
    return sum(len(group) * max(group) + PASS_COST for group in groups)


def find_cheapest_cost(lengths):
    """Return the least cost of all ways to cut the sorted lengths."""
    lengths = sorted(lengths)
    inner = range(1, len(lengths))
    cuts = [cut for n in range(len(lengths)) for cut in combinations(inner, n)]
    return min(sum_costs([lengths[a:b] for a, b in zip((0, *cut), (*cut, len(lengths)), strict=True)]) for cut in cuts)


def test_no_other_split_reads_fewer_padded_tokens():
    draw = random.Random(0)
    for _ in range(20):
        lengths = [draw.choice([5, 40, 90, 300, 800]) + draw.randrange(9) for _ in range(8)]
        groups = split_by_length(build_requests(lengths))
        lengths_by_group = [[len(request.ids) for request in group] for group in groups]
        assert sum_costs(lengths_by_group) == find_cheapest_cost(lengths)
        assert [length for group in lengths_by_group for length in group] == sorted(lengths)


def test_prompts_of_one_length_share_a_pass_and_a_long_one_does_not_join_them():
    assert [len(group) for group in split_by_length(build_requests([50] * 9))] == [9]
    assert [len(group) for group in split_by_length(build_requests([50, 900, 50, 50]))] == [3, 1]
