"""Drafts and their recipes: what `draft=NAME` chooses in each command.

conf/drafts.yaml has an entry for each: its method, its options and its recipe. conf/entry.py makes
options of Hydra's groups of them, so that whatever is typed wins over a recipe.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from models.drafts.options import METHODS
from models.io.errors import require

CONF = Path(__file__).parent


def list_options(schema: type) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the group, the name and the content of each option that drafts bring to a command.

    A recipe brings what is a field of the command's `schema`.

    >>> @dataclasses.dataclass
    ... class PlanConf:
    ...     target: str
    ...     draft: str
    >>> content = {(group, name): node for group, name, node in list_options(PlanConf)}
    >>> content["draft", "qwen3-8b-eagle3"]["defaults"]  # no data, no optimizer: none is used
    ['schema/eagle3', {'override /target@_global_.target': 'qwen3-8b'}, '_self_']
    """
    fields = {field.name for field in dataclasses.fields(schema)}
    for name, entry in load_drafts().items():
        recipe = {key: choice for key, choice in entry["recipe"].items() if key in fields}
        groups = {key: choice for key, choice in recipe.items() if isinstance(choice, str | dict)}
        for group, choice in groups.items():
            if isinstance(choice, dict):
                yield group, name, choice
        defaults: list[Any] = [f"schema/{entry['method']}"]
        if values := {key: value for key, value in recipe.items() if key not in groups}:  # of no group
            yield "draft/recipe", name, values
            defaults.append({"recipe@_global_": name})
        defaults += [
            {f"override /{group}@_global_.{group}": choice if isinstance(choice, str) else name}
            for group, choice in groups.items()
        ]
        options = {key: value for key, value in entry.items() if key not in ("method", "recipe")}
        yield "draft", name, {"defaults": [*defaults, "_self_"], **options}


@functools.cache
def load_drafts() -> dict[str, Any]:
    """Return the entries of conf/drafts.yaml; raise UserError for one without a method or a recipe."""
    drafts = yaml.safe_load((CONF / "drafts.yaml").read_text())
    for name, entry in drafts.items():
        require(
            entry.get("method") in METHODS,
            f"conf/drafts.yaml: {name}.method: must be one of {', '.join(METHODS)}, got {entry.get('method')}; "
            "a new method is listed in METHODS of models/drafts/options.py",
        )
        require(
            isinstance(entry.get("recipe"), dict),
            f"conf/drafts.yaml: {name}.recipe: must have keys, got {entry.get('recipe')}; name at least its target",
        )
    return drafts
