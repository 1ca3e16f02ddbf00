"""Token trees are closed under prefixes and list parents first; impossible trees are refused."""

import heapq

import numpy as np
import pytest
import torch

from infer.measure.acceptance import best_first_paths
from models.io.errors import UserError
from models.operators import stable_topk
from models.trees.config import TreeConf
from models.trees.growth import ancestor_mask, grow, node_depths
from models.trees.sampling import Sampler
from models.trees.sampling_config import SamplingConf
from models.trees.tree import TreeKind

VOCAB = 5
GREEDY = Sampler(rule=SamplingConf())


def build_dynamic(**conf):
    return TreeConf(**{"depth": 4, "nodes": 9, "beam_width": 3, "children": 3} | conf).build()


def draw_scores(path, *, ties=False, cut=False):
    """Return the scores after a path, the same at every call."""
    numbers = torch.Generator().manual_seed(hash(path) % 2**31)
    scores = torch.randn(VOCAB, generator=numbers)
    if ties:
        scores = scores.round()
    if cut:  # as top-p leaves them
        scores[torch.rand(VOCAB, generator=numbers) < 0.5] = -torch.inf
        scores[len(path) % VOCAB] = 0.0
    return scores


def list_paths(proposal, row, root=()):
    """List the token paths of a row, in the order of the proposal."""
    paths = [root]
    for token, parent in zip(proposal.ids[row].tolist(), proposal.parents[row].tolist(), strict=True):
        assert parent + 1 < len(paths)  # parents first
        paths.append((*paths[parent + 1], token))
    return paths[1:]


def grow_paths(tree, *, root=(0,), **kind):
    """Grow a tree from `root`; list its paths in the order of the proposal."""
    before = [root]

    def expand(tokens, above, level):
        nonlocal before
        before = [(*before[parent], token) for token, parent in zip(tokens[0].tolist(), above[0].tolist(), strict=True)]
        return torch.stack([draw_scores(path, **kind) for path in before])[None]

    proposal = grow(tree, GREEDY, draw_scores(root, **kind)[None], expand)
    return list_paths(proposal, 0, root)


@pytest.mark.parametrize("kind", [{}, {"ties": True}, {"cut": True}, {"ties": True, "cut": True}])
def test_dynamic_trees_are_closed_under_prefixes_also_under_ties(kind):
    for number in range(40):
        paths = grow_paths(build_dynamic(), root=(number,), **kind)
        assert len(set(paths)) == len(paths) == 9
        assert all(path[:-1] in paths or len(path) == 2 for path in paths)
        assert max(map(len, paths)) <= 5


def search_best_first(root, nodes, depth):
    """List the likeliest paths by textbook best-first search: pop the best, push its children."""
    paths, queue = [], [(-0.0, root)]
    while len(paths) <= nodes:
        negative, path = heapq.heappop(queue)
        paths.append(path)
        if len(path) <= depth:
            logp = draw_scores(path).log_softmax(-1)
            for token, value in enumerate(logp.tolist()):
                heapq.heappush(queue, (negative - value, (*path, token)))
    return paths[1:]


def test_dynamic_trees_are_those_of_best_first_search():
    tree = build_dynamic(depth=3, nodes=12, beam_width=VOCAB**2, children=VOCAB)  # wide enough to prune nothing
    for number in range(20):
        assert grow_paths(tree, root=(number,)) == search_best_first((number,), nodes=12, depth=3)


@pytest.mark.parametrize("nodes", [5, 9, 25])
def test_a_width_of_all_nodes_prunes_nothing(nodes):
    """For independent guesses, a distribution for each depth, the tree is the best of all trees."""
    numbers = np.random.default_rng(nodes)
    tree = TreeConf(depth=4, nodes=nodes, beam_width=None, children=VOCAB).build()
    for _ in range(20):
        table = numbers.dirichlet(np.ones(VOCAB), size=4)
        logits = torch.from_numpy(table).log()[:, None]
        depth = iter(range(1, 4))
        proposal = grow(tree, GREEDY, logits[0], lambda *_: logits[next(depth)][None])  # noqa: B023
        tokens = np.argsort(-table, axis=1)  # of each rank
        ranks = best_first_paths(np.take_along_axis(table, tokens, 1), nodes)
        expected = [tuple(tokens[d, rank] for d, rank in enumerate(path)) for path in ranks]
        assert list_paths(proposal, 0) == expected


def test_a_chain_takes_the_likeliest_token_each_time():
    tree = TreeConf(kind=TreeKind.chain, depth=3).build()
    path = (7,)
    for _ in range(3):
        path = (*path, int(draw_scores(path).argmax()))
    assert grow_paths(tree, root=(7,)) == [path[:2], path[:3], path]


def test_a_static_tree_takes_the_ranks_that_it_names():
    paths = [[1, 0, 2], [0], [1], [0, 1], [1, 0]]
    tree = TreeConf(kind=TreeKind.static, paths=paths).build()
    expected = []
    for ranks in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
        path = (3,)
        for rank in ranks:
            order = draw_scores(path).argsort(descending=True).tolist()
            path = (*path, order[rank])
        expected.append(path)
    assert grow_paths(tree, root=(3,)) == expected
    assert (tree.nodes, tree.depth, tree.scratch_slots) == (5, 3, 3)
    assert sorted(tree.paths) == sorted(paths)


def test_ancestors_and_depths_are_those_of_a_plain_loop():
    numbers = torch.Generator().manual_seed(0)
    parents = torch.stack(
        [torch.randint(-1, max(i, 1), (6,), generator=numbers).clamp(max=i - 1) for i in range(20)], dim=1
    )
    above = ancestor_mask(parents)
    for row in range(6):
        for node in range(21):
            seen, at = {0}, node
            while at > 0:
                seen.add(at)
                at = int(parents[row, at - 1]) + 1
            assert set(above[row, node].nonzero()[:, 0].tolist()) == seen
            assert node_depths(above)[row, node] == len(seen) - 1


REFUSED = {
    "tree.depth: must be at least 1, got 0": {"depth": 0},
    "tree.nodes: must be at most the 6 candidates": {"depth": 2, "beam_width": 4, "children": 2, "nodes": 7},
    "tree.nodes: of a dynamic tree must be above tree.depth = 4, got 4; raise it, or take tree=chain": {"nodes": 4},
    "tree.paths: a static tree needs rank paths, got null": {"kind": TreeKind.static},
    "tree.paths: every path needs its prefix, got [0, 0]": {"kind": TreeKind.static, "paths": [[1], [0, 0]]},
    "tree.paths: ranks count from 0, got [[-1]]": {"kind": TreeKind.static, "paths": [[-1]]},
    "tree.paths: must be distinct and not empty, got [[0], [0]]": {"kind": TreeKind.static, "paths": [[0], [0]]},
    "tree.file: must be a readable JSON file, got nowhere.json": {"kind": TreeKind.static, "file": "nowhere.json"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_impossible_trees_are_refused_by_key(message):
    with pytest.raises(UserError) as refused:
        TreeConf(**REFUSED[message]).build()
    assert str(refused.value).startswith(message)


def test_every_tree_that_is_not_refused_has_the_nodes_it_promises():
    for depth, width, branch, nodes in [(2, 4, 2, 6), (3, 1, 2, 6), (1, 1, 5, 5), (3, 2, 4, 20)]:
        tree = build_dynamic(depth=depth, beam_width=width, children=branch, nodes=nodes)
        assert len(grow_paths(tree)) == nodes
        with pytest.raises(UserError, match=r"tree\.nodes: must be at most"):
            build_dynamic(depth=depth, beam_width=width, children=branch, nodes=nodes + 1)


# --- operators --------------------------------------------------------------------------------


def draw_extreme_scores(number: int) -> torch.Tensor:
    """Draw scores with ties; the bits of `number` add -inf, NaN, the lowest and the smallest number."""
    numbers = torch.Generator().manual_seed(number)
    scores = torch.randint(-3, 4, (3, 1 + 13 * (number % 4)), generator=numbers).float()
    for bit, value in enumerate((-torch.inf, torch.nan, torch.finfo().min, -1e-45)):
        if number >> bit & 1:
            scores[torch.rand(scores.shape, generator=numbers) < 0.3] = value
    return scores


@pytest.mark.parametrize("number", range(16))
def test_the_stable_top_is_the_start_of_a_stable_sort(number):
    scores = draw_extreme_scores(number)
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    for count in {1, scores.shape[1] // 2, scores.shape[1]} - {0}:
        top, top_index = stable_topk(scores, count)
        assert torch.equal(top_index, index[:, :count])
        torch.testing.assert_close(top, ordered[:, :count], rtol=0, atol=0, equal_nan=True)
