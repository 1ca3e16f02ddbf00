"""The shapes of token trees: the candidates that a draft proposes in one round.

Chains and static trees take fixed ranks of each node's children; dynamic trees keep the likeliest
nodes (EAGLE-2, arXiv 2406.16858). `growth.py` grows them.
"""

from dataclasses import dataclass
from enum import Enum

from models.io.errors import require

MAX_CHAIN_LENGTH = 64  # tokens that a chain proposes, at most: one of n-gram lookup, or one that the tuner tries


class TreeKind(Enum):
    """The rule that chooses the candidates of a round."""

    chain = "chain"
    static = "static"
    dynamic = "dynamic"


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The sizes of a tree; of a chain or a static tree, `levels[d][i]` is (index of the parent in level d-1, rank).

    `depth` and `nodes` are those of the grown tree; `ngram_tokens` copied nodes are added to it.
    """

    kind: TreeKind
    depth: int
    nodes: int
    beam_width: int = 1
    children: int = 1
    levels: tuple[tuple[tuple[int, int], ...], ...] = ()
    ngram_tokens: int = 0

    graph_key = property(str)  # what compiled graphs depend on; see models/device/graph_budget.py

    @property
    def max_path_length(self) -> int:
        """Return the number of draft tokens that one round can accept at most."""
        return max(self.depth, self.ngram_tokens)

    @property
    def is_in_place(self) -> bool:
        """Return whether an accepted path stands where its keys belong: that of a chain alone.

        A chain has one node a level; a dynamic tree has no levels.
        """
        return sum(map(len, self.levels)) == self.depth and not self.ngram_tokens

    @property
    def width(self) -> int:
        """Return how many of the likeliest tokens a node may take as its children."""
        return max([self.children, *(rank + 1 for level in self.levels for _, rank in level)])

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

    @property
    def round_slots(self) -> int:
        """Return how many slots after a row's tokens a round may write."""
        # + 1: a round emits its path and one token of the target's own
        return max(self.size, self.scratch_slots) + self.max_path_length + 1


NO_TREE = Tree(kind=TreeKind.chain, depth=0, nodes=0)  # autoregressive decoding


def tree_from_paths(paths: list[list[int]], *, kind: TreeKind = TreeKind.static) -> Tree:
    """Build a tree of rank paths; raise UserError for a missing prefix, a duplicate or a negative rank."""
    unique = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    require(
        len(unique) == len(paths) and bool(paths) and all(paths),
        f"tree.paths: must be distinct and not empty, got {paths}",
    )
    require(min(map(min, unique)) >= 0, f"tree.paths: ranks count from 0, got {paths}; 0 is the likeliest token")
    index: dict[tuple[int, ...], int] = {(): 0}
    levels: list[list[tuple[int, int]]] = [[] for _ in unique[-1]]  # the last path is the deepest
    for path in unique:
        require(
            path[:-1] in index,
            f"tree.paths: every path needs its prefix, got {list(path)} without {list(path[:-1])}; add it",
        )
        level = levels[len(path) - 1]
        index[path] = len(level)
        level.append((index[path[:-1]], path[-1]))
    return Tree(kind=kind, depth=len(levels), nodes=len(unique), levels=tuple(tuple(level) for level in levels))
