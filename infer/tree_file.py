"""Convert a chain or static tree to another engine's format; the input's format is detected.

python -m infer.tree_file tree=medusa-63 format=nxd output=tree.json
python -m infer.tree_file tree.file=tree.json format=medusa output=choices.json
"""

from dataclasses import dataclass, field

from conf.entry import entry_point
from models.io.console import print_line
from models.io.errors import require
from models.io.files import open_output_file
from models.trees.config import TreeConf
from models.trees.tree import TreeKind
from models.trees.tree_formats import TreeFormat, write_paths


@dataclass(kw_only=True)
class TreeFileConf:
    """The configuration of `python -m infer.tree_file`: a tree, a format and an output file."""

    tree: TreeConf = field(default_factory=TreeConf)
    format: TreeFormat = TreeFormat.own
    output: str = "tree.json"
    output_dir: str = "outputs/infer.tree_file"  # of a Hydra multirun

    def __post_init__(self) -> None:
        tree = self.tree.read()
        require(
            tree.kind is not TreeKind.dynamic and not tree.ngram_tokens,
            f"tree: must be a chain or a static tree, got {tree.kind.value} with "
            f"{tree.ngram_tokens} copied tokens; no file can hold what each round chooses",
        )


@entry_point("tree_file", TreeFileConf)
def main(conf: TreeFileConf) -> None:
    paths = conf.tree.build().paths
    with open_output_file(conf.output) as file:
        write_paths(paths, file, tree_format=conf.format)
    print_line(f"{len(paths)} nodes: {file}")


if __name__ == "__main__":
    main()
