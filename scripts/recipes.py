"""Write the tables of docs/recipes.md from docs/recipes.yaml: published values beside ours.

    python -m scripts.recipes --write

tests/cli/test_recipes.py compares both with the configurations.
"""

import json
import sys
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from scripts.bench_tables import replaced

FOLDER = Path(__file__).parent.parent / "docs"
DATA, PAGE = FOLDER / "recipes.yaml", FOLDER / "recipes.md"


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    page = PAGE.read_text()
    for recipe in load_recipes()["recipes"]:
        page = replaced(page, recipe["name"], render_recipe(recipe))
    PAGE.write_text(page)


def load_recipes() -> dict[str, Any]:
    """Return the sources and the recipes."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(DATA)))


def render_recipe(recipe: dict[str, Any]) -> str:
    """Return the values of a recipe as Markdown."""
    sources, main = load_recipes()["sources"], recipe["after"]
    drafts = ", ".join(f"`draft={name}`" for name in recipe["drafts"])
    origin = f", after {link_source(sources[main])}" if main else ""
    lines = [f"{drafts}{origin}.", "", "| key | ours | published | remark |", "|---|---|---|---|"]
    for value in recipe["values"]:
        remarks = [value.get("why"), value.get("note")]
        if value.get("source", main) != main:
            remarks.append(link_source(sources[value["source"]]))
        cells = [
            f"`{value['key']}`", format_value(our_value(value)), format_value(value["published"]),
            "; ".join(filter(None, remarks)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def link_source(source: dict[str, str]) -> str:
    """Return the title of a source as a link."""
    return f"[{source['title']}]({source['url']})"


def our_value(value: dict[str, Any]) -> Any:
    """Return the value of our configuration, which is the published one unless `ours` differs."""
    return value.get("ours", value["published"])


def format_value(value: Any) -> str:
    """Return a value as a configuration writes it.

    >>> [format_value(value) for value in (1e-4, 0.015, [0.9, 0.95], None, True, "cosine")]
    ['0.0001', '0.015', '[0.9, 0.95]', 'null', 'true', 'cosine']
    """
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    return str(value) if isinstance(value, str | float) else json.dumps(value)


if __name__ == "__main__":
    main()
