"""Print benchmark tables and write them between the markers of docs/benchmarks.md."""

import os
import platform
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.text import Text

from infer.report.number_format import Table, choose_console, to_rich_table
from models.device.device import Device
from models.device.packages import installed_version

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def markdown(*tables: Table, setting: str) -> str:
    """Return the tables with their notes and the setting of the measurement as Markdown."""
    parts = [part for table in tables for part in (table.render_markdown(), table.note)]
    return "\n\n".join([*parts, f"Measured on {setting}."])


def replaced(page: str, name: str, content: str) -> str:
    """Return the page with the text between the markers `name` replaced by `content`.

    >>> print(replaced("a <!-- loss --> b <!-- /loss --> c", "loss", "new"))
    a <!-- loss -->
    new
    <!-- /loss --> c
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = page.partition(begin)
    _, end_marker, after = rest.partition(end)
    if not end_marker:
        raise ValueError(f"the page lacks the markers {begin} ... {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def publish(name: str, *tables: Table, setting: str, page: Path = PAGE, should_write: bool) -> None:
    """Print measured tables, for logs with a fixed width; write them to their place in the page if asked to."""
    console = choose_console(Console())
    for table in tables:
        console.print(Text(f"\n{table.title}", style="bold"))
        console.print(to_rich_table(table, ruled=console.is_terminal))
        console.print(Text(table.note, style="dim"))
    if should_write:
        page.write_text(replaced(page.read_text(), name, markdown(*tables, setting=setting)))


def machine(device: Device) -> str:
    """Describe the machine: enough to judge the figures, nothing that identifies it."""
    info = device.describe()
    return (
        f"{info['name']} ({info['kind']}, {os.cpu_count()} cores, {info['threads']} threads), {info['dtype']}, "
        f"{'compiled' if device.compiles else 'eager'}, "
        f"{platform.system()}, Python {platform.python_version()}, torch {installed_version('torch')}, "
        f"transformers {installed_version('transformers')}, {date.today()}"
    )
