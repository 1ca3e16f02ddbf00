"""Trees on disk: our own JSON, Medusa's path lists, NxD Inference's adjacency.

    own      {"paths": [[0], [1], [0, 0]], ...what was measured of it}
             {"tree": {"kind": "dynamic", "depth": 4, "nodes": 12, ...}, ...} of any kind
    medusa   [[0], [1], [0, 0]]
    nxd      {"0": ["1", "2"], "1": ["3"]}    node 0 is the root, leaves have no entry

A path lists ranks: [0, 1] is the second likeliest child of the likeliest first token. Adjacency
numbers nodes level by level and lists children by rank, so it has no tree that skips a rank.
"""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from models.errors import UserError

Paths = list[list[int]]
KINDS = ("chain", "static", "dynamic")
NUMBERS = {"depth", "nodes", "width", "branch", "copied"}  # fields of a TreeConf


class TreeFormat(Enum):
    """Recognised on reading, chosen on writing."""

    own = "own"
    medusa = "medusa"
    nxd = "nxd"


def read_fields(file: Path) -> dict[str, Any]:
    """The fields of a TreeConf that a tree file of any format means; `kind` is a string."""
    content = _content(file)
    said = content.get("tree") if isinstance(content, dict) else None
    if not isinstance(said, dict):
        return {"kind": "static", "paths": read_paths(file)}
    kind, numbers = said.get("kind"), {k: v for k, v in said.items() if k != "kind"}
    whole = all(type(v) is int for k, v in numbers.items() if (k, v) != ("width", None))
    if kind not in KINDS or not numbers.keys() <= NUMBERS or not whole:
        raise UserError(
            f"tree.file: `tree` must hold a kind of {', '.join(KINDS)} and whole numbers for "
            f"{', '.join(sorted(NUMBERS))}, got {said} in {file}"
        )
    return said | ({"paths": read_paths(file)} if kind == "static" else {})


def read_paths(file: Path) -> Paths:
    """The rank paths of a tree file of any format."""
    content = _content(file)
    if isinstance(content, dict) and "0" in content:
        return _from_adjacency(content, file)
    paths = content.get("paths") if isinstance(content, dict) else content
    if not isinstance(paths, list) or not all(map(_is_path, paths)):
        raise UserError(
            f"tree.file: must hold a list of rank paths, got {file}; e.g. [[0], [0, 0]]"
        )
    return paths


def _content(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"tree.file: must be a readable JSON file, got {file}: {error}") from error


def _is_path(path: object) -> bool:
    return isinstance(path, list) and all(type(rank) is int for rank in path)


def write_paths(
    paths: Paths, file: Path, *, form: TreeFormat = TreeFormat.own,
    about: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """A tree file; `about` is what our own format says of the tree beside its paths."""
    contents = {
        TreeFormat.own: lambda: {"paths": paths} | (about or {}),
        TreeFormat.medusa: lambda: paths,
        TreeFormat.nxd: lambda: to_adjacency(paths),
    }
    file.write_text(json.dumps(contents[form]()) + "\n")


def to_adjacency(paths: Paths) -> dict[str, list[str]]:
    """Children of each inner node. Raises UserError for a tree that skips a rank.

    >>> to_adjacency([[0], [1], [0, 0]])
    {'0': ['1', '2'], '1': ['3']}
    """
    ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    number = {(): 0} | {path: i for i, path in enumerate(ordered, 1)}
    children: dict[str, list[str]] = {}
    for path in ordered:
        elder = children.setdefault(str(number[path[:-1]]), [])
        if path[-1] != len(elder):
            raise UserError(
                f"format: nxd needs every rank below the last of a node, got {list(path)} without "
                f"{[*path[:-1], len(elder)]}; write medusa or own"
            )
        elder.append(str(number[path]))
    return children


def _from_adjacency(children: dict[str, Any], file: Path) -> Paths:
    """Level by level from the root: ids that come in any other order are refused."""
    rule = f"tree.file: must number nodes level by level from root 0, got {file}"
    paths: list[list[int]] = [[]]
    for number, path in enumerate(paths):  # grows as it goes
        below = children.get(str(number), [])
        expected = [str(len(paths) + rank) for rank in range(len(below))]
        if below != expected:
            raise UserError(f"{rule} with {below} below node {number}; expected {expected}")
        paths += [[*path, rank] for rank in range(len(below))]
    if lost := [key for key in children if not key.isdecimal() or int(key) >= len(paths)]:
        raise UserError(f"{rule} with children of {lost[0]}, which is no node; take them out")
    return paths[1:]
