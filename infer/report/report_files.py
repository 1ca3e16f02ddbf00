"""The files of a report, whose page needs no network, and what W&B shows of it."""

import json
from dataclasses import asdict
from pathlib import Path

from infer.report.definitions import DEFINITIONS
from infer.report.number_format import format_lossless
from infer.report.prose import build_headline, describe_training, describe_verdicts, list_absences
from infer.report.tables import build_tables, collect_definitions, render_markdown, summary_table
from infer.report.views import list_modes
from infer.results.schema import Report
from models.io.files import write_text_atomically
from models.io.pages import render_html
from models.io.tracking import TrackedResults

HEADLINE_METRICS = ("acceptance_length", "delivered_per_round", "speedup", "tokens_per_s")
TEMPLATE = Path(__file__).with_name("report.html.j2")
KIND_LEGEND = {
    "prompt": "the prompt",
    "accepted": "written by the draft, accepted",
    "target": "the target's own: what the draft proposed was rejected, or its proposal ended",
}


def render_page(report: Report) -> str:
    """Return report.html; all text in it is escaped."""
    from infer.report.plots import render_plots  # a command starts a second sooner without matplotlib

    tables = build_tables(report)
    return render_html(
        TEMPLATE,
        report=report,
        verdicts=describe_verdicts(report),
        headline=build_headline(report),
        training=describe_training(report),
        absences=list_absences(report),
        tables=tables,
        plots=render_plots(report),
        definitions=collect_definitions(tables),
        all_definitions=DEFINITIONS,
        kind_legend=KIND_LEGEND,
    )


def write_report_files(report: Report, directory: Path) -> None:
    """Write report.json, report.md, report.html and, for an evaluation, rounds.jsonl."""
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
        if text:  # a report that was read from a file has no rounds
            write_text_atomically(directory / name, text)


def collect_results(report: Report, folder: Path, *, prefix: str) -> TrackedResults:
    """Return the results of a report that is written to `folder`; its figures have names such as `tree/speedup`."""
    table, views = summary_table(report), list_modes(report)
    figures = {
        f"{view.label}/{metric}": estimate.mean
        for view in views
        for metric in HEADLINE_METRICS
        if (estimate := getattr(view.mode.figures, metric)) is not None
    }
    return TrackedResults(
        prefix=prefix,
        figures=figures | {f"{view.label}/lossless": format_lossless(view.mode.verdict, view.draft) for view in views},
        columns=table.columns,
        rows=table.rows,
        page=(folder / "report.html").read_text(encoding="utf-8"),
    )
