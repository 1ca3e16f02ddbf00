"""Writing of report files."""

import json
from dataclasses import asdict
from pathlib import Path

from infer.measure.report_schema import Report
from infer.report.html import render_page
from infer.report.tables import render_markdown
from models.files import write_text_atomically


def write_report_files(report: Report, directory: Path) -> None:
    """Write report.json, report.md and report.html, and for an evaluation rounds.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    content = asdict(report)
    rounds = content.pop("rounds", [])
    files = {
        "report.json": json.dumps(content, indent=1, allow_nan=False) + "\n",
        "report.md": render_markdown(report),
        "report.html": render_page(report),
        "rounds.jsonl": "".join(json.dumps(row, allow_nan=False) + "\n" for row in rounds),
    }
    for name, text in files.items():
        if text:
            write_text_atomically(directory / name, text)
