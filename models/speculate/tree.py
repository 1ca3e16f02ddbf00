"""Token trees: the candidates that a draft proposes and the target scores in one pass.

A tree grows level by level from the root, the last known token. Chains and static trees take fixed
ranks of each node's children; dynamic trees keep the likeliest nodes (EAGLE-2, arXiv 2406.16858).

Axes: B rows, N nodes (root not counted), W nodes expanded at once, V vocabulary.
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

from models.errors import require
from models.speculate.sampling import Sampler
from models.speculate.tree_formats import read_fields
from models.validation import at_least, check_values

# tokens [B, W] (target ids), the index of each one's parent among the nodes expanded before [B, W],
# and their depth -> raw logits [B, W, draft_vocab], or [B, 1, draft_vocab] if all W have the same
ExpandFn = Callable[[Tensor, Tensor, int], Tensor]


class TreeKind(Enum):
    """The rule that chooses the candidates of a round."""

    chain = "chain"
    static = "static"
    dynamic = "dynamic"


@dataclass(kw_only=True)
class TreeConf:
    """The shape of a proposal; `paths` are rank paths, e.g. [[0], [1], [0, 0]]."""

    kind: TreeKind = TreeKind.dynamic
    depth: int = 4  # tokens from the root to the deepest node
    nodes: int = 12  # node budget of a dynamic tree, root not counted
    beam_width: int | None = 4  # nodes expanded per level of a dynamic tree; null = `nodes`
    children: int = 4  # candidates below each expanded node of a dynamic tree
    ngram_tokens: int = 0  # tokens of an additional chain, from n-gram lookup
    paths: list[list[int]] | None = None  # of a static tree
    file: str | None = None  # in a format of models/speculate/tree_formats.py; replaces the above
    # a training run and `infer.eval` also tune, and decode with the choice beside this tree
    auto: bool = False

    def __post_init__(self) -> None:
        check_values(
            self,
            "tree",
            depth=at_least(1),
            nodes=at_least(1),
            beam_width=at_least(1),
            children=at_least(1),
            ngram_tokens=at_least(0, "0 copies none"),
        )
        is_static, is_dynamic = self.kind is TreeKind.static, self.kind is TreeKind.dynamic
        require(
            self.paths is None or is_static or self.file is not None,
            f"tree.paths: needs a static tree, got tree.kind={self.kind.value}; use tree=static",
        )
        require(
            not is_static or bool(self.paths or self.file),
            "tree.paths: a static tree needs rank paths, got null; set tree.file",
        )
        pool = count_candidates(self.depth, self.expanded, self.children)
        require(
            not is_dynamic or self.nodes <= pool,
            f"tree.nodes: must be at most the {pool} candidates that depth, beam_width and "
            f"children give, got {self.nodes}; raise tree.beam_width or tree.children",
        )
        require(
            not is_dynamic or self.nodes >= self.depth,
            f"tree.nodes: must be at least tree.depth = {self.depth}, got {self.nodes}",
        )

    @property
    def expanded(self) -> int:
        """Return the number of nodes expanded per level of a dynamic tree."""
        return self.nodes if self.beam_width is None else self.beam_width

    def read(self) -> "TreeConf":
        """Return the configuration with the fields of its file, if it has one."""
        if self.file is None:
            return self
        fields = {"paths": None, **read_fields(Path(self.file))}
        return replace(self, file=None, **fields | {"kind": TreeKind(fields["kind"])})

    def build(self) -> "Tree":
        """Build the tree; raise UserError for paths or a file that are invalid."""
        if self.file is not None:
            return self.read().build()
        if self.kind is TreeKind.dynamic:
            return Tree(
                kind=self.kind, depth=self.depth, nodes=self.nodes, beam_width=self.expanded,
                children=self.children, ngram_tokens=self.ngram_tokens,
            )  # fmt: skip
        paths = (
            [[0] * d for d in range(1, self.depth + 1)]
            if self.kind is TreeKind.chain
            else self.paths or []
        )
        return replace(tree_from_paths(paths, kind=self.kind), ngram_tokens=self.ngram_tokens)


def count_candidates(depth: int, beam_width: int, children: int) -> int:
    """Return the number of candidates that a dynamic tree chooses from.

    >>> count_candidates(2, 4, 3)  # three, and three below each of them
    12
    """
    pool = level = children
    for _ in range(depth - 1):
        level = min(beam_width, level) * children
        pool += level
    return pool


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A fixed tree shape; if static, `levels[d][i]` is (index of the parent in level d-1, rank).

    `depth` and `nodes` are those of the grown tree; `ngram_tokens` copied nodes are added to it.
    """

    kind: TreeKind
    depth: int
    nodes: int
    beam_width: int = 1
    children: int = 1
    levels: tuple[tuple[tuple[int, int], ...], ...] = ()
    ngram_tokens: int = 0

    @property
    def max_path_length(self) -> int:
        """Return the number of draft tokens that one round can accept at most."""
        return max(self.depth, self.ngram_tokens)

    @property
    def size(self) -> int:
        """Return the number of nodes that the target scores, the root not counted."""
        return self.nodes + self.ngram_tokens

    @property
    def paths(self) -> list[list[int]]:
        """Return the rank paths of a chain or static tree by level, without the copied nodes."""
        paths: list[list[int]] = []
        parent_paths: list[list[int]] = [[]]
        for level in self.levels:
            parent_paths = [[*parent_paths[parent], rank] for parent, rank in level]
            paths += parent_paths
        return paths

    @property
    def scratch_slots(self) -> int:
        """Return the slots that growing needs in a draft's cache: one for each expanded node."""
        if self.kind is TreeKind.dynamic:
            return (self.depth - 1) * self.beam_width
        return sum(len({parent for parent, _ in level}) for level in self.levels[1:])


NO_TREE = Tree(kind=TreeKind.chain, depth=0, nodes=0)  # autoregressive decoding


def tree_from_paths(paths: list[list[int]], *, kind: TreeKind = TreeKind.static) -> Tree:
    """Build a tree of rank paths; raise UserError for a missing prefix or a duplicate."""
    unique = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    require(
        len(unique) == len(paths) and bool(paths) and all(paths),
        f"tree.paths: must be distinct and not empty, got {paths}",
    )
    index: dict[tuple[int, ...], int] = {(): 0}
    levels: list[list[tuple[int, int]]] = [[] for _ in unique[-1]]  # the last path is the deepest
    for path in unique:
        require(
            path[:-1] in index and min(path) >= 0,
            f"tree.paths: every path needs its prefix, got {list(path)} without "
            f"{list(path[:-1])}; add it",
        )
        level = levels[len(path) - 1]
        index[path] = len(level)
        level.append((index[path[:-1]], path[-1]))
    return Tree(kind=kind, depth=len(levels), nodes=len(unique),
                levels=tuple(tuple(level) for level in levels))  # fmt: skip


def best_first_paths(acceptance: Float[ndarray, "depth ranks"], nodes: int) -> list[list[int]]:
    """Return the paths of the tree with the most expected accepted tokens, best path first.

    The tree has `nodes` nodes. `acceptance[d, r]` is the probability that the candidate of rank r
    below an accepted path of depth d is accepted. The probability of a path is the product of its
    candidates', and the expectation is the sum over paths. No product exceeds its parent's, so the
    `nodes` largest products form a tree, and no tree has a larger sum.

    >>> import numpy as np
    >>> best_first_paths(np.array([[0.6, 0.3], [0.6, 0.1]]), 3)
    [[0], [0, 0], [1]]
    """
    # Probabilities are negated, as heapq pops the smallest. The root comes first, with 1.
    queue: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    paths: list[list[int]] = []
    while len(paths) <= nodes:
        negated, depth, path = heapq.heappop(queue)
        paths.append(list(path))
        if depth < len(acceptance):
            for rank, share in enumerate(acceptance[depth].tolist()):
                heapq.heappush(queue, (negated * share, depth + 1, (*path, rank)))
    return paths[1:]  # without the root


def ancestor_mask(
    parents_BN: Int[Tensor, "batch nodes"],
) -> Bool[Tensor, "batch verified verified"]:
    """Return the nodes that each node attends to: itself and its ancestors; the root is node 0.

    >>> ancestor_mask(torch.tensor([[-1, -1, 0]])).int()[0]  # root, two children, one grandchild
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    batch, nodes = parents_BN.shape
    eye = torch.eye(nodes + 1, dtype=torch.bool, device=parents_BN.device)
    ancestors = eye.expand(batch, -1, -1)
    # The root is its own parent.
    jump = torch.cat([torch.zeros_like(parents_BN[:, :1]), parents_BN + 1], 1)
    for _ in range(nodes.bit_length()):  # pointer doubling: the reach, 1 at first, doubles
        ancestors = ancestors | ancestors.gather(1, jump[:, :, None].expand_as(ancestors))
        jump = jump.gather(1, jump)
    return ancestors


def node_depths(ancestors: Bool[Tensor, "batch nodes nodes"]) -> Int[Tensor, "batch nodes"]:
    """Return the depth of each node from its ancestors, the root having depth 0."""
    return ancestors.sum(-1) - 1


@dataclass(kw_only=True)
class Proposal:
    """One token tree per row: node i is a child of node `parents[i]`; -1 is the root.

    The root is the last known token and not a node. `child_log_probs`: the log-probabilities from
    which the children of the root and of each node were drawn, without replacement and in their
    order; entries of leaves are not used. It is None if the tree was not drawn.
    """

    ids: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]  # parents[i] < i
    child_log_probs: Float[Tensor, "batch verified vocab"] | None = field(default=None, repr=False)


def grow(
    tree: Tree, sampler: Sampler, first: Float[Tensor, "batch draft_vocab"], expand: ExpandFn, *,
    kept_ids: Int[Tensor, " draft_vocab"] | None = None, vocab_size: int | None = None,
) -> Proposal:  # fmt: skip
    """Return a proposal of the shape of `tree`, grown from the root's raw logits `first`.

    `expand` returns the raw logits after each chosen node, or the same ones for all of them.
    `kept_ids` are the target ids of a reduced draft vocabulary, and `vocab_size` is the size of the
    target's.
    """
    grow_kind = _grow_dynamic if tree.kind is TreeKind.dynamic else _grow_static
    return grow_kind(
        tree,
        _CandidateScorer(sampler, kept_ids, vocab_size or first.shape[-1]),
        first[:, None],
        expand,
    )


class _CandidateScorer:
    """The scores of a draft's candidates under a sampler, with tokens as target ids."""

    def __init__(self, sampler: Sampler, kept_ids: Tensor | None, vocab: int):
        self.sampler, self.kept_ids, self.vocab = sampler, kept_ids, vocab

    def score_candidates(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return warped logits [B, W, draft_vocab], and the same with noise."""
        warped = self.sampler.warp(logits, self.kept_ids)
        return warped, self.sampler.perturb(warped, level, self.kept_ids)

    def target_ids(self, tokens: Tensor) -> Tensor:
        return tokens if self.kept_ids is None else self.kept_ids[tokens]

    def target_log_probs(self, warped: Tensor) -> Tensor:
        """Return log-probabilities over the target's vocabulary [B, W, V]."""
        log_probs = warped.log_softmax(-1)
        if self.kept_ids is None:
            return log_probs
        full = log_probs.new_full((*log_probs.shape[:2], self.vocab), -torch.inf)
        return full.index_copy(2, self.kept_ids, log_probs)


def _grow_static(
    tree: Tree, scorer: _CandidateScorer, logits: Tensor, expand: ExpandFn
) -> Proposal:
    expanded = [0]  # indices in the level above of the nodes whose children are drafted
    ids, parents = [], []
    offset = -1  # number of the first node of the level above; -1 is the root
    drawn_from: dict[int, Tensor] = {}  # by node; 0 is the root
    for depth, level in enumerate(tree.levels):
        ranks = max(rank for _, rank in level) + 1
        warped, scores = scorer.score_candidates(logits, depth)
        top = scores.topk(ranks, dim=-1).indices.expand(-1, len(expanded), -1)
        if scorer.sampler.draws:
            log_probs = scorer.target_log_probs(warped).expand(-1, len(expanded), -1)
            drawn_from |= {offset + 1 + p: log_probs[:, i] for i, p in enumerate(expanded)}
        tokens = scorer.target_ids(
            torch.stack([top[:, expanded.index(p), rank] for p, rank in level], 1)
        )
        ids.append(tokens)
        parents += [p + offset if depth else -1 for p, _ in level]
        offset = len(parents) - len(level)
        if depth + 1 < tree.depth:
            previous, expanded = expanded, sorted({p for p, _ in tree.levels[depth + 1]})
            parent_index = [previous.index(level[i][0]) for i in expanded]
            parent_index_W = torch.tensor(parent_index, device=tokens.device)
            logits = expand(tokens[:, expanded], parent_index_W.expand(len(tokens), -1), depth + 1)
    child_log_probs = None
    if scorer.sampler.draws:
        leaf = torch.full_like(drawn_from[0], -torch.inf)
        child_log_probs = torch.stack([drawn_from.get(i, leaf) for i in range(len(parents) + 1)], 1)
    return Proposal(
        ids=torch.cat(ids, 1),
        parents=torch.tensor(parents, device=logits.device).expand(len(logits), -1),
        child_log_probs=child_log_probs,
    )


def _grow_dynamic(
    tree: Tree, scorer: _CandidateScorer, logits: Tensor, expand: ExpandFn
) -> Proposal:
    def children(logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        _, scores = scorer.score_candidates(logits, level)
        # Values above 0, which rounding may cause, would let a child outrank its parent.
        log_probs = scores.float().log_softmax(-1).clamp_max(0.0)
        logp, token = log_probs.topk(tree.children, dim=-1)
        return logp, scorer.target_ids(token)

    logp, token = (part[:, 0] for part in children(logits, 0))
    pool = [(logp, token, torch.full_like(token, -1))]  # the candidates of each level
    size = 0  # candidates before this level
    parent_index = torch.zeros_like(token)
    for level in range(1, tree.depth):
        width = min(tree.beam_width, token.shape[1])
        beam_logp, beam = _stable_topk(logp, width)
        logits = expand(token.gather(1, beam), parent_index.gather(1, beam), level)
        child_logp, child = (part.expand(-1, width, -1) for part in children(logits, level))
        # index of the parent among all candidates
        parent = (beam + size)[:, :, None].expand_as(child).flatten(1)
        size += token.shape[1]
        logp, token = (beam_logp[:, :, None] + child_logp).flatten(1), child.flatten(1)
        beam_index = torch.arange(width, device=token.device)[None, :, None]
        parent_index = beam_index.expand_as(child).flatten(1)
        pool.append((logp, token, parent))
    all_logp, candidates, parents = (torch.cat(parts, 1) for parts in zip(*pool, strict=True))
    _, best = _stable_topk(all_logp, tree.nodes)
    node_index = torch.arange(tree.nodes, device=best.device).expand_as(best)
    # the node of each candidate in the tree, or -1 if it was not chosen
    node_of = torch.full_like(candidates, -1).scatter(1, best, node_index)
    best_parent = parents.gather(1, best)
    return Proposal(
        ids=candidates.gather(1, best),
        parents=torch.where(best_parent < 0, -1, node_of.gather(1, best_parent.clamp_min(0))),
    )


def _stable_topk(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values and indices of the top `count`: by value, of equal ones the earlier.

    Parents come before their children and score no less, so a tree that is cut by this order is
    prefix-closed and lists parents first, even with ties.
    """
    ordered, index = values.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], index[:, :count]
