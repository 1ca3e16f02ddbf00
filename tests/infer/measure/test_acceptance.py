"""The table of acceptance by depth and rank is exact, and its best tree has the highest expected length."""

from itertools import product

import numpy as np
import pytest

from data.demo.prompts import held_out_prompts
from data.eval_prompts.prompts import load_calibration_prompts
from infer.engine.decode import Decoder
from infer.measure.acceptance import AcceptanceCounter, best_first_paths, build_comb
from models.trees.sampling_config import SamplingConf
from models.trees.tree import tree_from_paths
from tests.support.models.tiny import demo_target
from tests.support.models.watching import watch_rounds

NEW = 32


def draw_tables():
    """Draw small random tables: shares of a row sum to less than 1; some are 0, some rows are equal."""
    numbers = np.random.default_rng(0)
    for number in range(12):
        table = numbers.dirichlet(np.ones(4), size=3)[:, :3]  # ranks need not fall
        if number % 3 == 0:
            table[numbers.random(table.shape) < 0.3] = 0.0
        if number % 4 == 0:
            table[1] = table[0]
        yield table


def list_all_trees(depth: int, ranks: int, nodes: int):
    """Return every prefix-closed set of `nodes` paths, grown one path at a time."""
    paths = [p for d in range(1, depth + 1) for p in product(range(ranks), repeat=d)]
    grown = {frozenset()}
    for _ in range(nodes):
        grown = {
            tree | {path}
            for tree in grown
            for path in paths
            if path not in tree and (len(path) == 1 or path[:-1] in tree)
        }
    return grown


def expect_tokens(table, paths) -> float:
    """Return the expected tokens a round, summed path by path."""
    return 1 + sum(np.prod([table[d, rank] for d, rank in enumerate(path)]) for path in paths)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_no_tree_of_as_many_nodes_has_a_higher_expected_length_than_best_first_search_yields(nodes):
    trees = list_all_trees(3, 3, nodes)
    for table in draw_tables():
        paths = best_first_paths(table, nodes)
        assert len({tuple(path) for path in paths}) == nodes
        assert expect_tokens(table, paths) == pytest.approx(max(expect_tokens(table, t) for t in trees))


def count_in_loops(rounds, depth):
    """Count visits and hits in loops; a round is its candidates by depth and its emitted tokens."""
    visits, hits = [0] * depth, [[0] * 3 for _ in range(depth)]
    for candidates, emitted in rounds:
        for d in range(depth):
            visits[d] += 1
            if emitted[d] not in candidates[d]:
                break
            rank = candidates[d].index(emitted[d])
            hits[d][rank] += 1
            if rank > 0:
                break
    return visits, hits


def test_the_table_counts_along_the_likeliest_path_of_each_row(target, learned):
    """Two rows of different lengths are decoded at a time: one row goes on when the other has ended."""
    draft, texts = learned
    tally, rounds = AcceptanceCounter(3, 3), []

    def watch(proposal, emitted, count):
        active = count > 0
        tally.count_rounds(proposal.ids[active], emitted[active])
        for ids, row in zip(proposal.ids[active].tolist(), emitted[active].tolist(), strict=True):
            rounds.append(([ids[0:3], ids[3:6], ids[6:9]], row))

    decoder = Decoder(target, draft, tree_from_paths(build_comb(3, 3)), sampling=SamplingConf(), slots=64, batch=2)
    watch_rounds(decoder, watch)
    for first in range(0, 8, 2):
        prompts = [texts[first][:4], texts[first + 1][:9]]
        decoder.decode(prompts, row_ids=[0, 1], max_new_tokens=NEW)
    visits, hits = count_in_loops(rounds, 3)
    assert tally.rounds.tolist() == visits
    assert tally.hits.tolist() == hits
    assert visits[0] == len(rounds) > visits[1] > visits[2] > 0
    assert sum(sum(row[1:]) for row in hits) > 0


def test_the_demos_prompts_for_tuning_are_not_held_out():
    prompts = load_calibration_prompts(demo_target().tokenizer, "demo", 12)
    assert len(prompts) == 12
    target = demo_target()
    held_out = [target.tokenizer(p.text)["input_ids"] for p in held_out_prompts()]
    assert not [prompt.id for prompt in prompts if prompt.ids in held_out]
    assert len({prompt.category for prompt in prompts}) == 4
