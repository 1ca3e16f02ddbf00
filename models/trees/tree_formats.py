"""Trees on disk: our own JSON, Medusa's path lists, NxD Inference's adjacency.

    own      {"paths": [[0], [1], [0, 0]], ...measurements}
             {"tree": {"kind": "dynamic", "depth": 4, "nodes": 12, ...}, ...} of any kind; with "mode": "ngram"
             it is a chain of n-gram lookup alone
    medusa   [[0], [1], [0, 0]]
    nxd      {"0": ["1", "2"], "1": ["3"]}    node 0 is the root, leaves have no entry

A path lists ranks: [0, 1] is the second likeliest child of the likeliest first token. Adjacency
numbers nodes level by level and lists children by rank, so it cannot express a skipped rank.
"""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from models.io.errors import UserError, require

RankPaths = list[list[int]]
TREE_KINDS = ("chain", "static", "dynamic")
LOOKUP = "ngram"  # the `mode` of a file whose chain n-gram lookup decodes alone, without the draft
INTEGER_FIELDS = {"depth", "nodes", "beam_width", "children", "ngram_tokens"}  # of a TreeConf


class TreeFormat(Enum):
    """The format to write; reading detects it."""

    own = "own"
    medusa = "medusa"
    nxd = "nxd"


def read_fields(file: Path) -> dict[str, Any]:
    """Return the TreeConf fields of a tree file of any format; `kind` is a string.

    Raise UserError if the file is unreadable or invalid.
    """
    content = _load_json(file)
    fields = content.get("tree") if isinstance(content, dict) else None
    if not isinstance(fields, dict):
        return {"kind": "static", "paths": read_paths(file)}
    kind, numbers = fields.get("kind"), {k: v for k, v in fields.items() if k != "kind"}
    are_integers = all(type(v) is int for k, v in numbers.items() if (k, v) != ("beam_width", None))
    require(
        kind in TREE_KINDS and numbers.keys() <= INTEGER_FIELDS and are_integers,
        f"tree.file: `tree` must hold a kind of {', '.join(TREE_KINDS)} and whole numbers for "
        f"{', '.join(sorted(INTEGER_FIELDS))}, got {fields} in {file}",
    )
    return fields | ({"paths": read_paths(file)} if kind == "static" else {})


def names_lookup(file: Path) -> bool:
    """Return whether a tree file says that n-gram lookup decodes its chain alone."""
    content = _load_json(file)
    return isinstance(content, dict) and content.get("mode") == LOOKUP


def read_paths(file: Path) -> RankPaths:
    """Return the rank paths of a tree file of any format; raise UserError if it has none."""
    content = _load_json(file)
    paths = content.get("paths") if isinstance(content, dict) else content
    if isinstance(content, dict) and "0" in content:
        paths = _paths_from_adjacency(content, file)
    if not isinstance(paths, list) or not paths or not all(map(_is_path, paths)):
        raise UserError(f"tree.file: must hold a list of rank paths, got {file}; e.g. [[0], [0, 0]]")
    return paths


def _is_path(value: Any) -> bool:
    return isinstance(value, list) and all(type(rank) is int for rank in value)


def _load_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"tree.file: must be a readable JSON file, got {file}: {error}") from error


def write_paths(paths: RankPaths, file: Path, *, tree_format: TreeFormat = TreeFormat.own) -> None:
    """Write a tree file."""
    contents = {
        TreeFormat.own: lambda: {"paths": paths},
        TreeFormat.medusa: lambda: paths,
        TreeFormat.nxd: lambda: paths_to_adjacency(paths),
    }
    file.write_text(json.dumps(contents[tree_format]()) + "\n")


def paths_to_adjacency(paths: RankPaths) -> dict[str, list[str]]:
    """Return the children of each inner node; raise UserError for a tree that skips a rank.

    >>> paths_to_adjacency([[0], [1], [0, 0]])
    {'0': ['1', '2'], '1': ['3']}
    """
    ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
    number = {(): 0} | {path: i for i, path in enumerate(ordered, 1)}
    children: dict[str, list[str]] = {}
    for path in ordered:
        siblings = children.setdefault(str(number[path[:-1]]), [])
        require(
            path[-1] == len(siblings),
            f"format: nxd needs every rank below the last of a node, got {list(path)} without "
            f"{[*path[:-1], len(siblings)]}; write medusa or own",
        )
        siblings.append(str(number[path]))
    return children


def _paths_from_adjacency(children: dict[str, Any], file: Path) -> RankPaths:
    """Return the paths level by level from the root; raise UserError for ids out of order."""
    rule = f"tree.file: must number nodes level by level from root 0, got {file}"
    paths: list[list[int]] = [[]]
    for number, path in enumerate(paths):  # this also visits the paths that the loop appends
        child_ids = children.get(str(number), [])
        require(isinstance(child_ids, list), f"{rule} with {child_ids} below node {number}; list its children")
        expected = [str(len(paths) + rank) for rank in range(len(child_ids))]
        require(child_ids == expected, f"{rule} with {child_ids} below node {number}; expected {expected}")
        paths += [[*path, rank] for rank in range(len(child_ids))]
    if unknown := [key for key in children if not key.isdecimal() or int(key) >= len(paths)]:
        raise UserError(f"{rule} with children of {unknown[0]}, which is not a node; remove them")
    return paths[1:]
