"""The `tree` group of the configuration."""

from dataclasses import dataclass, replace
from pathlib import Path

from models.io.errors import UserError, at_least, check_values, require
from models.trees.tree import Tree, TreeKind, tree_from_paths
from models.trees.tree_formats import names_lookup, read_fields

SHAPE_FIELDS = {  # the numbers that a kind reads
    TreeKind.chain: ["depth"],
    TreeKind.static: [],
    TreeKind.dynamic: ["depth", "nodes", "beam_width", "children"],
}
TUNED = "tuned"  # the `file` of tree=tuned, and the end of the name of what tune=true leaves in a run's folder


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
    file: str | None = None  # in a format of models/trees/tree_formats.py; replaces the above

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("depth", "nodes", "beam_width", "children"), at_least(1))
        check_values(self, "tree", **sizes, ngram_tokens=at_least(0, "0 copies none"))
        for name in list_unread_fields(self.kind):
            require(
                getattr(self, name) == getattr(TreeConf, name),
                f"tree.{name}: is not read for tree.kind={self.kind.value}, got {getattr(self, name)}; leave it out, "
                f"or choose tree={self.kind.value} if another option of the group sets it",
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
            not is_dynamic or self.nodes > self.depth,
            f"tree.nodes: of a dynamic tree must be above tree.depth = {self.depth}, got {self.nodes}; raise it, or "
            "take tree=chain",
        )

    @property
    def expanded(self) -> int:
        """Return the number of nodes expanded per level of a dynamic tree."""
        return self.nodes if self.beam_width is None else self.beam_width

    @property
    def is_lookup(self) -> bool:
        """Return whether the file is of n-gram lookup alone, which the tuner chose in place of the draft."""
        return self.file is not None and names_lookup(Path(self.file))

    def read(self) -> "TreeConf":
        """Return the configuration with the fields of its file, if it has one."""
        if self.file is None:
            return self
        require(
            self.file != TUNED,
            "tree: tuned belongs to a checkpoint, got it in a command without one; take another, such as tree=chain",
        )
        fields = read_fields(Path(self.file))
        try:
            return TreeConf(kind=TreeKind(fields.pop("kind")), **fields)
        except UserError as error:
            raise UserError(f"tree.file: must hold a valid tree, got {self.file}: {error}") from error

    def build(self) -> Tree:
        """Build the tree; raise UserError for paths or a file that are invalid."""
        if self.file is not None:
            return self.read().build()
        if self.kind is TreeKind.dynamic:
            return Tree(
                kind=self.kind,
                depth=self.depth,
                nodes=self.nodes,
                beam_width=self.expanded,
                children=self.children,
                ngram_tokens=self.ngram_tokens,
            )
        paths = [[0] * d for d in range(1, self.depth + 1)] if self.kind is TreeKind.chain else self.paths or []
        return replace(tree_from_paths(paths, kind=self.kind), ngram_tokens=self.ngram_tokens)


def list_unread_fields(kind: TreeKind) -> list[str]:
    """Return the numbers that only other kinds read."""
    return [name for name in SHAPE_FIELDS[TreeKind.dynamic] if name not in SHAPE_FIELDS[kind]]


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
