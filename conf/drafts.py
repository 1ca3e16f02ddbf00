"""Drafts and their recipes: what `draft=NAME` chooses in each command.

conf/drafts.yaml has an entry for each: its method, its options and its recipe. conf/entry.py makes
options of Hydra's groups of them, so that whatever is typed wins over a recipe.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).parent


def list_options(command: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the group, the name and the content of each option that drafts bring to a command.

    >>> content = {(group, name): node for group, name, node in list_options("infer_plan")}
    >>> content["draft", "qwen3-8b-eagle3"]["defaults"]  # no data, no optimizer: none is used
    ['schema/eagle3', {'override /target@_global_.target': 'qwen3-8b'}, '_self_']
    """
    groups = _list_groups(command)
    for name, entry in _load_drafts().items():
        recipe = {group: choice for group, choice in entry["recipe"].items() if group in groups}
        for group, choice in recipe.items():
            if isinstance(choice, dict):
                yield group, name, choice
        overrides = [
            {f"override /{group}@_global_.{group}": choice if isinstance(choice, str) else name}
            for group, choice in recipe.items()
        ]
        options = {key: value for key, value in entry.items() if key not in ("method", "recipe")}
        schema = f"schema/{entry['method']}"
        yield "draft", name, {"defaults": [schema, *overrides, "_self_"], **options}


@functools.cache
def _load_drafts() -> dict[str, Any]:
    return yaml.safe_load((CONF / "drafts.yaml").read_text())


def _list_groups(command: str) -> set[str]:
    """Return the groups that the defaults of a command name, also by way of another file."""
    groups = set()
    for entry in yaml.safe_load((CONF / f"{command}.yaml").read_text())["defaults"]:
        if isinstance(entry, dict):
            groups |= set(entry)
        elif (CONF / f"{entry}.yaml").exists() and entry != "command":
            groups |= _list_groups(entry)
    return groups
