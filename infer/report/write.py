"""Writing of report files, each atomically."""

import json
import os
from pathlib import Path
from typing import Any

from infer.measure.report import EvalReport
from infer.report.html import render_page
from infer.report.tables import render_markdown


def write_report_files(report: dict[str, Any], directory: Path) -> None:
    """Write report.json, report.md and report.html, and for an evaluation rounds.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    write_file_atomically(
        directory / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n"
    )
    write_file_atomically(directory / "report.md", render_markdown(report))
    write_file_atomically(directory / "report.html", render_page(report))
    if isinstance(report, EvalReport):
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in report.rounds)
        write_file_atomically(directory / "rounds.jsonl", lines)


def write_file_atomically(path: Path, text: str) -> None:
    """Write under a temporary name and rename, so that a killed run leaves no partial file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
