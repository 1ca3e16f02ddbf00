"""Write and read rows in lines of JSON."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write the rows and return the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
