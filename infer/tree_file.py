"""Write a chain or static tree in another engine's format; what is read is recognised.

python -m infer.tree_file tree=medusa-63 format=nxd output=tree.json
python -m infer.tree_file tree.file=tree.json format=medusa output=choices.json
"""

from dataclasses import dataclass, field

from rich.console import Console

from conf.entry import entry_point
from models.checkpoint import output_file
from models.errors import UserError
from models.speculate.tree import TreeConf, TreeKind
from models.speculate.tree_formats import TreeFormat, write_paths


@dataclass(kw_only=True)
class TreeFileConf:
    """`python -m infer.tree_file`: which tree, in which format, where to."""

    tree: TreeConf = field(default_factory=TreeConf)
    format: TreeFormat = TreeFormat.own
    output: str = "tree.json"
    output_dir: str = "outputs/infer.tree_file"  # of a multirun

    def __post_init__(self) -> None:
        tree = self.tree.read()
        if tree.kind is TreeKind.dynamic or tree.copied:
            raise UserError(
                f"tree: must be a chain or a static tree, got {tree.kind.value} with "
                f"{tree.copied} copied tokens; no file can hold what each round chooses"
            )


@entry_point("tree_file", TreeFileConf)
def main(conf: TreeFileConf) -> None:
    paths = conf.tree.build().paths
    with output_file(conf.output) as file:
        write_paths(paths, file, form=conf.format)
    Console(soft_wrap=True, highlight=False).print(f"{len(paths)} nodes: {file}")


if __name__ == "__main__":
    main()
