"""Token trees: closed under prefixes, parents first, refused where they cannot be grown."""

import heapq
import json

import pytest
import torch

from models.errors import UserError
from models.sampling import Sampler, SamplingConf
from models.tree import TreeConf, TreeKind, ancestors, depths, grow, read_paths, write_paths

VOCAB = 5
GREEDY = Sampler(rule=SamplingConf().build())


def dynamic(**conf):
    return TreeConf(**{"depth": 4, "nodes": 9, "width": 3, "branch": 3} | conf).build()


def scores_of(path, *, ties=False, cut=False):
    """Scores behind a path, the same whenever they are asked for."""
    numbers = torch.Generator().manual_seed(hash(path) % 2**31)
    scores = torch.randn(VOCAB, generator=numbers)
    if ties:
        scores = scores.round()
    if cut:  # as top-p leaves them
        scores[torch.rand(VOCAB, generator=numbers) < 0.5] = -torch.inf
        scores[len(path) % VOCAB] = 0.0
    return scores


def grown(tree, *, root=(0,), **kind):
    """The paths of one row, in the order in which they were proposed."""
    before = [root]

    def expand(tokens, above):
        nonlocal before
        before = [
            (*before[parent], token)
            for token, parent in zip(tokens[0].tolist(), above[0].tolist(), strict=True)
        ]
        return torch.stack([scores_of(path, **kind) for path in before])[None]

    proposal = grow(tree, GREEDY, scores_of(root, **kind)[None], expand)
    paths = []
    for token, parent in zip(proposal.ids[0].tolist(), proposal.parents[0].tolist(), strict=True):
        assert parent < len(paths)  # parents first
        paths.append((*(paths[parent] if parent >= 0 else root), token))
    return paths


@pytest.mark.parametrize("kind", [{}, {"ties": True}, {"cut": True}, {"ties": True, "cut": True}])
def test_dynamic_trees_are_closed_under_prefixes_also_under_ties(kind):
    for number in range(40):
        paths = grown(dynamic(), root=(number,), **kind)
        assert len(set(paths)) == len(paths) == 9
        assert all(path[:-1] in paths or len(path) == 2 for path in paths)
        assert max(map(len, paths)) <= 5


def test_equal_scores_everywhere_still_give_a_tree():
    flat = torch.zeros(2, VOCAB)
    proposal = grow(
        dynamic(), GREEDY, flat, lambda tokens, above: flat[:, None].expand(-1, tokens.shape[1], -1)
    )
    assert (proposal.parents < torch.arange(9)).all()
    assert (depths(ancestors(proposal.parents))[:, 1:] > 0).all()


def best_first(root, nodes, depth):
    """The likeliest paths, by the textbook: pop the best, push its children."""
    found, queue = [], [(-0.0, root)]
    while len(found) <= nodes:
        negative, path = heapq.heappop(queue)
        found.append(path)
        if len(path) <= depth:
            logp = scores_of(path).log_softmax(-1)
            for token, value in enumerate(logp.tolist()):
                heapq.heappush(queue, (negative - value, (*path, token)))
    return found[1:]


def test_dynamic_trees_are_those_of_best_first_search():
    tree = dynamic(depth=3, nodes=12, width=VOCAB**2, branch=VOCAB)  # wide enough to prune nothing
    for number in range(20):
        assert grown(tree, root=(number,)) == best_first((number,), nodes=12, depth=3)


def test_a_chain_takes_the_likeliest_token_each_time():
    tree = TreeConf(kind=TreeKind.chain, depth=3).build()
    path = (7,)
    for _ in range(3):
        path = (*path, int(scores_of(path).argmax()))
    assert grown(tree, root=(7,)) == [path[:2], path[:3], path]


def test_a_static_tree_takes_the_ranks_that_it_names():
    paths = [[1, 0, 2], [0], [1], [0, 1], [1, 0]]
    tree = TreeConf(kind=TreeKind.static, paths=paths).build()
    wanted = []
    for ranks in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
        path = (3,)
        for rank in ranks:
            order = scores_of(path).argsort(descending=True).tolist()
            path = (*path, order[rank])
        wanted.append(path)
    assert grown(tree, root=(3,)) == wanted
    assert (tree.nodes, tree.depth, tree.scratch) == (5, 3, 3)


def test_ancestors_are_those_of_a_plain_loop():
    numbers = torch.Generator().manual_seed(0)
    parents = torch.stack(
        [torch.randint(-1, max(i, 1), (6,), generator=numbers).clamp(max=i - 1) for i in range(20)],
        dim=1,
    )
    above = ancestors(parents)
    for row in range(6):
        for node in range(21):
            seen, at = {0}, node
            while at > 0:
                seen.add(at)
                at = int(parents[row, at - 1]) + 1
            assert set(above[row, node].nonzero()[:, 0].tolist()) == seen
            assert depths(above)[row, node] == len(seen) - 1


REFUSED = {
    "tree.depth: must be at least 1, got 0": {"depth": 0},
    "tree.nodes: must be at most the 6 candidates": {
        "depth": 2, "width": 4, "branch": 2, "nodes": 7,
    },
    "tree.nodes: must be at least tree.depth = 4, got 3": {"nodes": 3},
    "tree.paths: a static tree needs rank paths, got null": {"kind": TreeKind.static},
    "tree.paths: every path needs its prefix, got [0, 0]": {
        "kind": TreeKind.static, "paths": [[1], [0, 0]],
    },
    "tree.paths: every path needs its prefix, got [-1]": {
        "kind": TreeKind.static, "paths": [[-1]],
    },
    "tree.paths: must be distinct and not empty, got [[0], [0]]": {
        "kind": TreeKind.static, "paths": [[0], [0]],
    },
    "tree.file: must be a readable JSON file, got nowhere.json": {
        "kind": TreeKind.static, "file": "nowhere.json",
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_impossible_trees_are_refused_by_key(message):
    with pytest.raises(UserError) as refused:
        TreeConf(**REFUSED[message]).build()
    assert str(refused.value).startswith(message)


def test_every_tree_that_is_not_refused_has_the_nodes_it_promises():
    for depth, width, branch, nodes in [(2, 4, 2, 6), (3, 1, 1, 3), (1, 1, 5, 5), (3, 2, 4, 20)]:
        tree = dynamic(depth=depth, width=width, branch=branch, nodes=nodes)
        assert len(grown(tree)) == nodes
        with pytest.raises(UserError, match=r"tree\.nodes: must be at most"):
            dynamic(depth=depth, width=width, branch=branch, nodes=nodes + 1)


def test_paths_survive_their_file(tmp_path):
    file = tmp_path / "tree.json"
    paths = [[0], [1], [0, 0]]
    write_paths(paths, file, about={"found": "by hand"})
    assert json.loads(file.read_text())["found"] == "by hand"
    assert read_paths(file) == paths
    for shipped in (None, [[0], [0, 0]]):  # a file is instead of the paths that tree=static brings
        assert TreeConf(kind=TreeKind.static, file=str(file), paths=shipped).build().nodes == 3
    file.write_text(json.dumps(paths))  # a bare list is read too
    assert read_paths(file) == paths


@pytest.mark.parametrize("content", ['{"tree": [[0]]}', "[0, 1]", '[["a"]]', "[[0.5]]"])
def test_a_file_without_rank_paths_is_refused(tmp_path, content):
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(UserError, match=r"tree\.file: must hold a list of rank paths"):
        read_paths(tmp_path / "tree.json")
