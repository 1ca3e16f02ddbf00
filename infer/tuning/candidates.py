"""Candidates of the tuner: the trees and windows that a draft, or n-gram lookup, could decode with.

A family is one kind of tree in increasing sizes; adjacent sizes are neighbors.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxtyping import Float
from numpy import ndarray

from infer.measure.acceptance import best_first_paths
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.trees.config import SHAPE_FIELDS, TreeConf, count_candidates
from models.trees.tree import Tree, TreeKind, tree_from_paths
from models.trees.tree_formats import LOOKUP

# Nodes expanded per level and children considered per node, in small and in large trees.
NARROW_WIDTH, WIDE_WIDTH = 4, 8
MAX_NARROW_NODES = 12  # nodes of a small tree
SHALLOW_DEPTHS = (2, 4)  # depths of trees for drafts with expensive passes
USER_TREE = "given"  # name of the user's own tree, from the `tree` config


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeCandidate:
    """A tree or window that the tuner considers, identified by its name."""

    name: str
    family: str
    conf: TreeConf

    @cached_property
    def tree(self) -> Tree:
        return self.conf.build()

    @property
    def size(self) -> int:
        """Return the number of nodes that the draft proposes; it orders a family."""
        return self.tree.nodes

    @property
    def is_lookup(self) -> bool:
        """Return whether n-gram lookup decodes alone."""
        return self.family == LOOKUP

    def choose_draft(self, draft: Draft) -> Draft:
        """Return the draft that decodes with the candidate: the given one, or n-gram lookup alone."""
        return NgramDraft() if self.is_lookup else draft

    @property
    def description(self) -> str:
        """Return the candidate in words, for readers who do not know its name."""
        tree, copied = self.tree, self.conf.ngram_tokens
        if self.is_lookup:
            return f"n-gram lookup alone, {tree.depth} tokens"
        shape = (
            f"chain of {tree.depth}"
            if tree.kind is TreeKind.chain
            else f"{tree.kind.value} tree of {tree.nodes} nodes, depth {tree.depth}"
        )
        return shape + (f", and {copied} copied tokens" if copied else "")

    def to_file(self) -> dict[str, Any]:
        """Return the tree as a file of models/trees/tree_formats.py holds it, and the mode of a report."""
        conf, kind = self.conf, self.conf.kind
        numbers = {name: getattr(conf, name) for name in [*SHAPE_FIELDS[kind], "ngram_tokens"]}
        paths = {"paths": conf.paths} if kind is TreeKind.static else {}
        return {"tree": {"kind": kind.value, **numbers}, **paths, "mode": LOOKUP if self.is_lookup else "tree"}


def list_candidates(
    acceptance: Float[ndarray, "depth ranks"],
    *,
    node_budgets: list[int],
    ngram_tokens: int,
    user_tree: TreeConf,
    ngram_windows: Sequence[int] = (),
) -> list[TreeCandidate]:
    """Return the chains, trees of each node budget, and the user's tree, up to the table's depth.

    `acceptance` is the share of positions at which the draft's token of a depth and rank is right. Each budget has a
    best-first, a dynamic and a product tree. If `ngram_tokens` is not 0, every candidate is listed again with a chain
    of that many n-gram tokens beside it. The last ones are the windows of n-gram lookup alone.
    """
    depth, ranks = acceptance.shape
    candidates = _build_windows("chain", range(1, depth + 1))
    for limit in [*(d for d in SHALLOW_DEPTHS if d < depth), depth]:
        suffix = f"-d{limit}" if limit < depth else ""
        for budget in sorted(set(node_budgets)):
            if budget <= sum(min(ranks**d, budget) for d in range(1, limit + 1)):
                candidates += _tree_candidates(acceptance[:limit], budget, suffix)
    if user_tree.build().depth <= depth:
        candidates.append(
            TreeCandidate(name=USER_TREE, family=USER_TREE, conf=replace(user_tree.read(), ngram_tokens=0))
        )
    if ngram_tokens:
        candidates += [add_copied_tokens(candidate, ngram_tokens) for candidate in candidates]
    return candidates + _build_windows(LOOKUP, sorted(set(ngram_windows)))


def _tree_candidates(acceptance: Float[ndarray, "depth ranks"], budget: int, suffix: str) -> Iterator[TreeCandidate]:
    """Yield the trees of a node budget, as deep as the best-first tree of that budget.

    Product trees come at full depth only, that is without a `suffix`.
    """
    paths, ranks = best_first_paths(acceptance, budget), acceptance.shape[1]
    depth = tree_from_paths(paths).depth
    if suffix and depth < len(acceptance):
        return  # the depth limit makes no difference
    yield _build_candidate(f"static{suffix}", TreeConf(kind=TreeKind.static, paths=paths), size=budget)
    max_width = NARROW_WIDTH if budget <= MAX_NARROW_NODES else WIDE_WIDTH
    for family, width in (("dynamic", max_width), ("product", None)):
        children = min(ranks, max_width)
        fits = depth < budget <= count_candidates(depth, width or budget, children)
        if fits and not (suffix and family == "product"):
            conf = TreeConf(depth=depth, nodes=budget, beam_width=width, children=children)
            yield _build_candidate(f"{family}{suffix}", conf, size=budget)


def _build_windows(family: str, windows: Iterable[int]) -> list[TreeCandidate]:
    return [_build_candidate(family, TreeConf(kind=TreeKind.chain, depth=size), size=size) for size in windows]


def _build_candidate(family: str, conf: TreeConf, *, size: int) -> TreeCandidate:
    return TreeCandidate(name=f"{family}-{size}", family=family, conf=conf)


def add_copied_tokens(candidate: TreeCandidate, ngram_tokens: int) -> TreeCandidate:
    """Build the same candidate with a chain of `ngram_tokens` copied tokens beside it."""
    return TreeCandidate(
        name=f"{candidate.name}+{ngram_tokens}",
        family=f"{candidate.family}+{ngram_tokens}",
        conf=replace(candidate.conf, ngram_tokens=ngram_tokens),
    )


def find_neighbors(candidate: TreeCandidate, candidates: list[TreeCandidate]) -> list[TreeCandidate]:
    """Return the next smaller and the next larger candidate of the same family, if any."""
    family = sorted((c for c in candidates if c.family == candidate.family), key=lambda c: c.size)
    index = family.index(candidate)
    return family[max(index - 1, 0) : index] + family[index + 1 : index + 2]


def select_sweep(candidates: list[TreeCandidate]) -> list[TreeCandidate]:
    """Select every window, the user's tree, and trees of three kinds and four budgets."""
    sizes = sorted({c.size for c in candidates if c.family == "static"})
    trees = [c for c in candidates if c.family == "static" or c.family.partition("+")[0] == "dynamic"]
    # The four budgets are the second and third smallest, and the two largest.
    return [c for c in candidates if c.family in ("chain", LOOKUP, USER_TREE)] + [
        c for c in trees if c.size in sizes[1:3] + sizes[-2:]
    ]
