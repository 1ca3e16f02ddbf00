"""The report of an evaluation as files."""

import json
import os
from pathlib import Path
from typing import Any

from infer.measure.report import Report
from infer.report.html import page
from infer.report.tables import markdown


def write(report: dict[str, Any], directory: Path) -> None:
    """report.json, report.md, report.html and rounds.jsonl, each complete or absent."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_text(directory / "report.md", markdown(report))
    write_text(directory / "report.html", page(report))
    if isinstance(report, Report):
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in report.rounds)
        write_text(directory / "rounds.jsonl", lines)


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name and rename, so that a killed run leaves no half file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
