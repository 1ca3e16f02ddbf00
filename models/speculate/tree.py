"""Token trees: the candidates that a draft proposes, laid out for one target pass to score them.

A tree is grown level by level from the root, the last known token. Chains and static trees take
fixed ranks of each node's children; dynamic trees keep the likeliest (EAGLE-2, arXiv 2406.16858).

Axes: B rows, N nodes (root not counted), W nodes expanded at once, K children a node, V vocabulary.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from models.errors import UserError
from models.speculate.sampling import Sampler
from models.speculate.tree_formats import read_fields

# tokens [B, W], target ids, and their parents' places among the nodes expanded before [B, W]
# -> raw logits [B, W, draft_vocab], or [B, 1, draft_vocab] where all W have the same
Expand = Callable[[Tensor, Tensor], Tensor]


class TreeKind(Enum):
    """How the candidates of a round are chosen."""

    chain = "chain"
    static = "static"
    dynamic = "dynamic"


@dataclass(kw_only=True)
class TreeConf:
    """The shape of a proposal. `paths` are rank paths, e.g. [[0], [1], [0, 0]]."""

    kind: TreeKind = TreeKind.dynamic
    depth: int = 4  # tokens from the root to the deepest node
    nodes: int = 12  # node budget of a dynamic tree, root not counted
    width: int | None = 4  # nodes expanded a level in a dynamic tree; null = all that can be in it
    branch: int = 4  # children considered of each expanded node in a dynamic tree
    copied: int = 0  # tokens of n-gram lookup that hang beside it, as one more chain
    paths: list[list[int]] | None = None  # of a static tree
    file: str | None = None  # a file of models/speculate/tree_formats.py, instead of those above

    def __post_init__(self) -> None:
        for key in ("depth", "nodes", "expanded", "branch"):
            if getattr(self, key) < 1:
                said = key.replace("expanded", "width")
                raise UserError(f"tree.{said}: must be at least 1, got {getattr(self, key)}")
        if self.copied < 0:
            raise UserError(f"tree.copied: must not be negative, got {self.copied}; 0 copies none")
        if self.paths is not None and self.kind is not TreeKind.static and self.file is None:
            raise UserError(
                f"tree.paths: needs a static tree, got tree.kind={self.kind.value}; "
                "take tree=static"
            )
        if self.kind is TreeKind.static and not (self.paths or self.file):
            raise UserError("tree.paths: a static tree needs rank paths, got null; set tree.file")
        pool = most_nodes(self.depth, self.expanded, self.branch)
        if self.kind is TreeKind.dynamic and self.nodes > pool:
            raise UserError(
                f"tree.nodes: must be at most the {pool} candidates that depth, width and branch "
                f"give, got {self.nodes}; raise tree.width or tree.branch"
            )
        if self.kind is TreeKind.dynamic and self.nodes < self.depth:
            raise UserError(
                f"tree.nodes: must be at least tree.depth = {self.depth}, got {self.nodes}"
            )

    @property
    def expanded(self) -> int:
        """Nodes expanded a level."""
        return self.nodes if self.width is None else self.width

    def read(self) -> "TreeConf":
        """The same with what its file says."""
        if self.file is None:
            return self
        said = {"paths": None, **read_fields(Path(self.file))}
        return replace(self, file=None, **{**said, "kind": TreeKind(said["kind"])})

    def build(self) -> "Tree":
        if self.file is not None:
            return self.read().build()
        if self.kind is TreeKind.dynamic:
            return Tree(kind=self.kind, depth=self.depth, nodes=self.nodes,
                        width=self.expanded, branch=self.branch, copied=self.copied)  # fmt: skip
        if self.kind is TreeKind.chain:
            paths = [[0] * d for d in range(1, self.depth + 1)]
        else:
            paths = self.paths or []
        return replace(static_tree(paths, kind=self.kind), copied=self.copied)


def most_nodes(depth: int, width: int, branch: int) -> int:
    """Candidates that a dynamic tree chooses from.

    >>> most_nodes(2, 4, 3)  # three, and three behind each of them
    12
    """
    pool = level = branch
    for _ in range(depth - 1):
        level = min(width, level) * branch
        pool += level
    return pool


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A fixed shape. Static ones: `levels[d][i]` is (place of the parent in level d-1, rank).

    `depth` and `nodes` are of what the draft grows; `copied` nodes hang beside that.
    """

    kind: TreeKind
    depth: int
    nodes: int
    width: int = 1
    branch: int = 1
    levels: tuple[tuple[tuple[int, int], ...], ...] = ()
    copied: int = 0

    def describe(self) -> dict[str, str | int]:
        """For the report: which tree was decoded with."""
        return {
            "kind": self.kind.value,
            "depth": self.depth,
            "nodes": self.nodes,
            "copied": self.copied,
        }

    @property
    def deepest(self) -> int:
        """Draft tokens that one round can accept."""
        return max(self.depth, self.copied)

    @property
    def size(self) -> int:
        """Nodes that the target scores, the root not counted."""
        return self.nodes + self.copied

    @property
    def paths(self) -> list[list[int]]:
        """Rank paths of a chain or static tree, level by level; those that `copied` adds aside."""
        found: list[list[int]] = []
        above: list[list[int]] = [[]]
        for level in self.levels:
            above = [[*above[parent], rank] for parent, rank in level]
            found += above
        return found

    @property
    def scratch(self) -> int:
        """Slots that growing needs in a draft's own cache: one for each expanded node."""
        if self.kind is TreeKind.dynamic:
            return (self.depth - 1) * self.width
        return sum(len({parent for parent, _ in level}) for level in self.levels[1:])


NO_TREE = Tree(kind=TreeKind.chain, depth=0, nodes=0)  # autoregressive decoding


def static_tree(paths: list[list[int]], *, kind: TreeKind = TreeKind.static) -> Tree:
    """Rank paths to a tree. Raises UserError for a path whose prefix is missing, or a duplicate."""
    unique = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    if len(unique) != len(paths) or not paths or not all(paths):
        raise UserError(f"tree.paths: must be distinct and not empty, got {paths}")
    place: dict[tuple[int, ...], int] = {(): 0}
    levels: list[list[tuple[int, int]]] = []
    for path in unique:
        if path[:-1] not in place or min(path) < 0:
            raise UserError(
                f"tree.paths: every path needs its prefix, got {list(path)} without "
                f"{list(path[:-1])}; add it"
            )
        if len(path) > len(levels):
            levels.append([])
        place[path] = len(levels[-1])
        levels[-1].append((place[path[:-1]], path[-1]))
    return Tree(kind=kind, depth=len(levels), nodes=len(unique),
                levels=tuple(tuple(level) for level in levels))  # fmt: skip


def best_first(acceptance: Float[ndarray, "depth ranks"], nodes: int) -> list[list[int]]:
    """The paths of the tree of `nodes` nodes with the most accepted tokens to expect, best first.

    `acceptance[d, r]` is the chance of the candidate of rank r behind a path of depth d; a path's
    is their product, and the expectation is the sum over nodes. No product is above its parent's,
    so the largest `nodes` of all products are a tree, and no tree has a larger sum.

    >>> import numpy as np
    >>> best_first(np.array([[0.6, 0.3], [0.6, 0.1]]), 3)
    [[0], [0, 0], [1]]
    """
    queue: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    found: list[list[int]] = []
    while len(found) <= nodes:
        value, depth, path = heapq.heappop(queue)
        found.append(list(path))
        if depth < len(acceptance):
            for rank, share in enumerate(acceptance[depth].tolist()):
                heapq.heappush(queue, (value * share, depth + 1, (*path, rank)))
    return found[1:]


def ancestors(parents_BN: Int[Tensor, "batch nodes"]) -> Bool[Tensor, "batch verified verified"]:
    """Which nodes each node attends to: itself and its ancestors, the root being node 0.

    >>> ancestors(torch.tensor([[-1, -1, 0]])).int()[0]  # root, two children, one grandchild
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    batch, nodes = parents_BN.shape
    eye = torch.eye(nodes + 1, dtype=torch.bool, device=parents_BN.device)
    above = eye.expand(batch, -1, -1)
    step = torch.cat([torch.zeros_like(parents_BN[:, :1]), parents_BN + 1], 1)  # root is its own
    reach = 1
    while reach <= nodes:  # pointer doubling: each turn sees twice as far up
        above = above | above.gather(1, step[:, :, None].expand_as(above))
        step = step.gather(1, step)
        reach *= 2
    return above


def depths(above: Bool[Tensor, "batch nodes nodes"]) -> Int[Tensor, "batch nodes"]:
    """Steps from the root, of each node."""
    return above.sum(-1) - 1


@dataclass(kw_only=True)
class Proposal:
    """A token tree a row: node i hangs on node `parents[i]`; -1 is the root, the last token.

    `behind`: log-probabilities that the children of root and nodes were drawn from, without
    replacement and in their order. None: the tree was not drawn. Rows of leaves are not read.
    """

    ids: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]  # parents[i] < i
    behind: Float[Tensor, "batch verified vocab"] | None = field(default=None, repr=False)


def grow(
    tree: Tree, sampler: Sampler, first: Float[Tensor, "batch draft_vocab"], expand: Expand, *,
    kept_ids: Int[Tensor, " draft_vocab"] | None = None, vocab: int | None = None,
) -> Proposal:  # fmt: skip
    """Grow `tree` from the root's raw logits `first`; `expand` gives those behind chosen nodes.

    It may give one row of logits for all of them. `kept_ids` are the target ids of a reduced draft
    vocabulary, `vocab` the size of the target's.
    """
    way = _grow_dynamic if tree.kind is TreeKind.dynamic else _grow_static
    return way(tree, _Ranking(sampler, kept_ids, vocab or first.shape[-1]), first[:, None], expand)


class _Ranking:
    """What a sampler makes of a draft's logits, in target ids."""

    def __init__(self, sampler: Sampler, kept_ids: Tensor | None, vocab: int):
        self.sampler, self.kept_ids, self.vocab = sampler, kept_ids, vocab
        self.draws = sampler.draws

    def scores(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Warped logits [B, W, draft_vocab], and the same with noise."""
        warped = self.sampler.warp(logits, self.kept_ids)
        return warped, self.sampler.perturb(warped, level, self.kept_ids)

    def ids(self, tokens: Tensor) -> Tensor:
        return tokens if self.kept_ids is None else self.kept_ids[tokens]

    def spread(self, warped: Tensor) -> Tensor:
        """Log-probabilities over the target's vocabulary [B, W, V]."""
        logp = warped.log_softmax(-1)
        if self.kept_ids is None:
            return logp
        whole = logp.new_full((*logp.shape[:2], self.vocab), -torch.inf)
        return whole.index_copy(2, self.kept_ids, logp)


def _grow_static(tree: Tree, ranking: _Ranking, logits: Tensor, expand: Expand) -> Proposal:
    expanded = [0]  # the nodes of the last level that were expanded
    ids, parents, offset = [], [], -1
    drawn_from: dict[int, Tensor] = {}  # by node, the root being 0
    for depth, level in enumerate(tree.levels):
        ranks = max(rank for _, rank in level) + 1
        warped, scores = ranking.scores(logits, depth)
        top = scores.topk(ranks, dim=-1).indices.expand(-1, len(expanded), -1)
        if ranking.draws:
            logp = ranking.spread(warped).expand(-1, len(expanded), -1)
            drawn_from |= {offset + 1 + p: logp[:, i] for i, p in enumerate(expanded)}
        tokens = ranking.ids(torch.stack([top[:, expanded.index(p), rank] for p, rank in level], 1))
        ids.append(tokens)
        parents += [p + offset if depth else -1 for p, _ in level]
        offset = len(parents) - len(level)
        if depth + 1 < tree.depth:
            before, expanded = expanded, sorted({p for p, _ in tree.levels[depth + 1]})
            above = [before.index(level[i][0]) for i in expanded]
            above_BW = torch.tensor(above, device=tokens.device).expand(len(tokens), -1)
            logits = expand(tokens[:, expanded], above_BW)
    behind = None
    if ranking.draws:
        leaf = torch.full_like(drawn_from[0], -torch.inf)
        behind = torch.stack([drawn_from.get(i, leaf) for i in range(len(parents) + 1)], 1)
    return Proposal(
        ids=torch.cat(ids, 1),
        parents=torch.tensor(parents, device=logits.device).expand(len(logits), -1),
        behind=behind,
    )


def _grow_dynamic(tree: Tree, ranking: _Ranking, logits: Tensor, expand: Expand) -> Proposal:
    def children(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        _, scores = ranking.scores(logits, level)
        logp, token = _log_probs(scores).topk(tree.branch, dim=-1)
        return logp, ranking.ids(token)

    logp, token = (part[:, 0] for part in children(logits, 0))
    parent = torch.full_like(token, -1)
    pool_logp, pool_token, pool_parent = [logp], [token], [parent]
    size = 0  # candidates before this level
    beam_above = torch.zeros_like(token)
    for level in range(1, tree.depth):
        width = min(tree.width, token.shape[1])
        beam_logp, beam = _first_largest(logp, width)
        logits = expand(token.gather(1, beam), beam_above.gather(1, beam))
        child_logp, child = (part.expand(-1, width, -1) for part in children(logits, level))
        number = (beam + size)[:, :, None]  # of the parent, among all candidates
        size += token.shape[1]
        logp = (beam_logp[:, :, None] + child_logp).flatten(1)
        token = child.flatten(1)
        parent = number.expand_as(child).flatten(1)
        place = torch.arange(width, device=token.device)[None, :, None]
        beam_above = place.expand_as(child).flatten(1)
        pool_logp.append(logp)
        pool_token.append(token)
        pool_parent.append(parent)
    _, best = _first_largest(torch.cat(pool_logp, 1), tree.nodes)
    candidates = torch.cat(pool_token, 1)
    rank = torch.full_like(candidates, -1)  # where a candidate stands in the tree
    places = torch.arange(tree.nodes, device=best.device).expand_as(best)
    rank = rank.scatter(1, best, places)
    above = torch.cat(pool_parent, 1).gather(1, best)
    return Proposal(
        ids=candidates.gather(1, best),
        parents=torch.where(above < 0, -1, rank.gather(1, above.clamp_min(0))),
    )


def _log_probs(scores: Tensor) -> Tensor:
    # never above 0, so that a child never outranks its parent by rounding
    return scores.float().log_softmax(-1).clamp_max(0.0)


def _first_largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Top `count` in a strict total order: value, then the earlier candidate.

    Parents come before their children and score no less, so a tree cut by this order is
    prefix-closed and listed parents first, ties included.
    """
    ordered, index = values.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], index[:, :count]
