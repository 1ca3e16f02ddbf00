"""Results of an evaluation for W&B: the summary table, the page and the headline figures."""

from pathlib import Path

from infer.report.mode_tables import summary_table
from infer.report.number_format import format_lossless
from infer.report.views import list_modes
from infer.results.schema import Report
from models.io.tracking import TrackedResults

HEADLINE_METRICS = ("acceptance_length", "delivered_per_round", "speedup", "tokens_per_s")


def collect_results(report: Report, folder: Path, *, prefix: str) -> TrackedResults:
    """Return the results of a report that is written to `folder`."""
    table = summary_table(report)
    return TrackedResults(
        prefix=prefix,
        figures=collect_headline_figures(report),
        columns=table.columns,
        rows=table.rows,
        page=(folder / "report.html").read_text(encoding="utf-8"),
    )


def collect_headline_figures(report: Report) -> dict[str, int | float | str]:
    """Return the headline figures of each measured mode, by names such as `tree/speedup`."""
    views = list_modes(report)
    means = {
        f"{view.label}/{metric}": estimate.mean
        for view in views
        for metric in HEADLINE_METRICS
        if (estimate := getattr(view.mode.figures, metric)) is not None
    }
    return means | {f"{view.label}/lossless": format_lossless(view.mode.verdict) for view in views}
