"""Tables in Markdown, and pages in HTML that stand alone: without scripts, fonts or a network."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render_markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, label_columns: int = 1) -> str:
    """Return a table whose first `label_columns` columns are text and whose others are numbers.

    >>> print(render_markdown_table(["a|b", "c"], [["d", "1"]]))
    | a\\|b | c |
    | --- | ---: |
    | d | 1 |
    """
    rule = ["---"] * label_columns + ["---:"] * (len(columns) - label_columns)
    lines = [[cell.replace("|", r"\|") for cell in row] for row in (columns, rule, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def render_html(template: Path, *, filters: dict[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """Return the page of a template; all text in it is escaped, and an unknown name is an error."""
    loader = FileSystemLoader(template.parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(filters or {})
    return environment.get_template(template.name).render(**values)
