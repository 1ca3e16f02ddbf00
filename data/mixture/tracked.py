"""Results of a prepared folder for W&B: its counts, its sources and its page."""

import json
from html import escape
from pathlib import Path

from data.mixture.report import REPORT_FILE, REPORT_PAGE_FILE
from models.tracking import TrackedResults

COUNTS = ("read", "train", "held_out", "dropped")


def collect_results(folder: Path) -> TrackedResults:
    """Return the results of a finished folder."""
    report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    page = (folder / REPORT_PAGE_FILE).read_text(encoding="utf-8")
    return TrackedResults(
        prefix="prepare_report",
        figures={name: report[name] for name in COUNTS},
        columns=["source", "path", "read", "train", "held_out"],
        rows=[
            [name, *(str(source[key]) for key in ("path", "read", "train", "held_out"))]
            for name, source in report["sources"].items()
        ],
        page=f"<pre>{escape(page)}</pre>",  # Markdown, which is readable as it is
    )
