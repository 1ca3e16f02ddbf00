"""Write the tables of docs/recipes.md from docs/recipes.yaml and docs/published.yaml.

    python -m scripts.recipes --write

tests/scripts/test_recipes.py compares the tables with the configurations and with the page.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from models.io.pages import render_markdown_table
from scripts.benchmarks.tables import replaced

FOLDER = Path(__file__).parent.parent / "docs"
PAGE = FOLDER / "recipes.md"


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    page = PAGE.read_text()
    for name, content in render_all().items():
        page = replaced(page, name, content)
    PAGE.write_text(page)


def load_data() -> dict[str, Any]:
    """Return the recipes, the tables and the groups of sources."""
    files = [OmegaConf.load(FOLDER / name) for name in ("recipes.yaml", "published.yaml")]
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(*files)))


def render_all() -> dict[str, str]:
    """Return everything between the markers of the page, by the name of the markers."""
    data = load_data()
    numbers = {name: i for i, name in enumerate(list_sources(data), start=1)}
    ours = {v["key"]: our_value(v) for v in data["recipes"][0]["values"] if "key" in v}
    return (
        {recipe["name"]: render_recipe(recipe, numbers) for recipe in data["recipes"]}
        | {table["name"]: render_cells(table, numbers, ours) for table in data["tables"]}
        | {"sources": render_sources(data["sources"], numbers)}
    )


def render_recipe(recipe: dict[str, Any], numbers: dict[str, int]) -> str:
    """Return the values of a recipe as Markdown."""
    columns, rows = ["key", "ours", "published", "remark"], []
    for value in recipe["values"]:
        published = format_value(value["published"]) + mark(value_sources(value, recipe), numbers)
        label = f"`{value['key']}`" if "key" in value else value["what"]
        remark = "; ".join(value[name] for name in ("why", "note") if name in value)
        rows.append([label, format_value(our_value(value)), published, remark])
    drafts = ", ".join(f"`draft={name}`" for name in recipe["drafts"])
    if "recipe" in recipe:
        drafts += f", each with `recipe={recipe['recipe']}`"
    return f"{drafts}.\n\n{render_markdown_table(columns, rows, label_columns=len(columns))}"


def render_cells(table: dict[str, Any], numbers: dict[str, int], ours: dict[str, Any]) -> str:
    """Return a table of cells as Markdown; `{key}` in a text becomes our value."""
    cells = [[cell if isinstance(cell, list) else [cell] for cell in row] for row in table["rows"]]
    texts = [[text + mark(names, numbers) for text, *names in row] for row in cells]
    markdown = render_markdown_table(table["columns"], texts, label_columns=len(table["columns"]))
    return re.sub(r"\{(.+?)\}", lambda match: format_value(ours[match[1]]), markdown)


def render_sources(groups: list[dict[str, Any]], numbers: dict[str, int]) -> str:
    """Return the numbered sources as Markdown: a paragraph for each repository."""
    lines = []
    for group in groups:
        links, start = group.get("links", {}), "* "
        if "repository" in group:
            address = f"https://github.com/{group['repository']}"
            start = f"* [{group['repository']}]({address}) at {group['commit'][:7]}: "
            at_commit = f"{address}/blob/{group['commit']}"
            links = {name: [file, f"{at_commit}/{file}"] for name, file in group["files"].items()}
        entries = [f"{numbers[name]} [{title}]({url})" for name, (title, url) in links.items()]
        lines.append(start + ", ".join(entries))
    return "\n".join(lines)


def list_sources(data: dict[str, Any]) -> list[str]:
    """Return the names of the sources in the order of their numbers."""
    return [name for group in data["sources"] for name in group.get("files", group.get("links"))]


def value_sources(value: dict[str, Any], recipe: dict[str, Any]) -> list[str]:
    """Return the names of a value's sources; a value that nobody published has none."""
    names = value.get("source", [] if value["published"] == "none" else recipe["after"])
    return names if isinstance(names, list) else [names]


def mark(names: list[str], numbers: dict[str, int]) -> str:
    """Return the numbers of sources, raised.

    >>> mark(["paper", "code"], {"code": 1, "paper": 2}), mark([], {})
    (' <sup>1, 2</sup>', '')
    """
    marks = ", ".join(str(number) for number in sorted(numbers[name] for name in names))
    return f" <sup>{marks}</sup>" if marks else ""


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
