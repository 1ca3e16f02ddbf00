"""The trees and windows that a draft could decode with: what the tuner chooses from.

A family is one kind of shape in growing sizes; sizes beside each other are neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jaxtyping import Float
from numpy import ndarray

from infer.tuning.config import overrides
from models.speculate.tree import Tree, TreeConf, TreeKind, best_first, most_nodes, static_tree

NARROW, WIDE = 4, 8  # nodes expanded a level, children considered, of small and large trees
SMALL = 12  # nodes of a small tree
SHALLOW = (2, 4)  # depths of trees for drafts whose every step is dear
GIVEN = "given"  # the tree that the user asks to compare with


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """One shape; `name` tells it from the others."""

    name: str
    family: str
    conf: TreeConf

    @cached_property
    def tree(self) -> Tree:
        return self.conf.build()

    @property
    def size(self) -> int:
        """Nodes that the draft grows: what orders a family."""
        return self.tree.nodes

    @property
    def fields(self) -> dict[str, int | str | None]:
        """What models/speculate/tree_formats.py keeps of it beside the paths of a static one."""
        conf, kind = self.conf, self.conf.kind
        numbers: dict[TreeKind, dict[str, int | None]] = {
            TreeKind.chain: {"depth": conf.depth},
            TreeKind.static: {},
            TreeKind.dynamic: {
                "depth": conf.depth, "nodes": conf.nodes, "width": conf.width,
                "branch": conf.branch,
            },
        }  # fmt: skip
        return {"kind": kind.value, **numbers[kind], "copied": conf.copied}

    def overrides(self, file: Path) -> str:
        """What makes `infer.eval` decode with it; `file` holds a static tree's paths."""
        keys = {f"tree.{key}": value for key, value in self.fields.items() if key != "kind"}
        if self.conf.kind is TreeKind.static:
            keys = {"tree.file": file} | keys
        return overrides({"tree": self.conf.kind, **keys})


def shapes(
    acceptance: Float[ndarray, "depth ranks"], *, nodes: list[int], copied: int, given: TreeConf
) -> list[Shape]:
    """Chains to the table's depth; best-first, dynamic and product trees of each budget; `given`.

    With `copied`, each of them a second time with so many tokens of n-gram lookup beside it.
    """
    depth, ranks = acceptance.shape
    found = [
        _named("chain", TreeConf(kind=TreeKind.chain, depth=window), size=window)
        for window in range(1, depth + 1)
    ]
    for limit in [*(d for d in SHALLOW if d < depth), depth]:
        suffix = f"-d{limit}" if limit < depth else ""
        for budget in sorted(set(nodes)):
            if budget <= sum(min(ranks**d, budget) for d in range(1, limit + 1)):
                found += _trees(acceptance[:limit], budget, suffix)
    if given.build().depth <= depth:
        found.append(Shape(name=GIVEN, family=GIVEN, conf=replace(given.read(), copied=0)))
    if copied:
        found += [with_copied(one, copied) for one in found]
    return found


def _trees(acceptance: Float[ndarray, "depth ranks"], budget: int, suffix: str) -> Iterator[Shape]:
    """Of that budget, as deep as the best-first one; all of them at full depth only."""
    paths, ranks = best_first(acceptance, budget), acceptance.shape[1]
    depth = static_tree(paths).depth
    if suffix and depth < len(acceptance):
        return  # the same as without the limit
    yield _named(f"static{suffix}", TreeConf(kind=TreeKind.static, paths=paths), size=budget)
    across = NARROW if budget <= SMALL else WIDE
    for family, width in (("dynamic", across), ("product", None)):
        branch = min(ranks, across)
        fits = depth <= budget <= most_nodes(depth, width or budget, branch)
        if fits and not (suffix and family == "product"):
            conf = TreeConf(depth=depth, nodes=budget, width=width, branch=branch)
            yield _named(f"{family}{suffix}", conf, size=budget)


def _named(family: str, conf: TreeConf, *, size: int) -> Shape:
    return Shape(name=f"{family}-{size}", family=family, conf=conf)


def with_copied(one: Shape, copied: int) -> Shape:
    """The same beside a chain of copied tokens."""
    return Shape(
        name=f"{one.name}+{copied}", family=f"{one.family}+{copied}",
        conf=replace(one.conf, copied=copied),
    )  # fmt: skip


def neighbours(one: Shape, others: list[Shape]) -> list[Shape]:
    """The next smaller and the next larger of its family."""
    family = sorted((o for o in others if o.family == one.family), key=lambda o: o.size)
    here = family.index(one)
    return family[max(here - 1, 0) : here] + family[here + 1 : here + 2]
