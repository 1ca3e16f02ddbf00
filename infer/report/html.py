"""report.html: the report as one page without scripts, fonts or anything else from a network."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from infer.measure.report_schema import Report
from infer.report.definitions import POSITION_COLUMN, get_definition
from infer.report.plots import render_plots
from infer.report.prose import build_headline, list_absences
from infer.report.tables import build_tables, collect_definitions
from infer.report.views import has_several_drafts

MAX_PROMPT_CHARS = 400  # the last characters of a prompt that are shown
KIND_LEGEND = {
    "prompt": "the prompt",
    "accepted": "written by the draft, accepted",
    "target": "the target's own: what the draft proposed was rejected, or its proposal ended",
}


def render_page(report: Report) -> str:
    """Render the whole page, in which all text is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tables = build_tables(report)
    return environment.get_template("report.html.j2").render(
        report=report,
        headline=build_headline(report),
        absences=list_absences(report),
        tables=tables,
        plots=render_plots(report),
        definitions=collect_definitions(tables),
        get_definition=get_definition,
        position_column=POSITION_COLUMN,
        several_drafts=has_several_drafts(report),
        kind_legend=KIND_LEGEND,
        max_prompt_chars=MAX_PROMPT_CHARS,
    )
