"""Compare two sides, each of one or more reports: tabulate changes, and name the regressions."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from infer.comparison.diff import (
    VerdictPairs,
    find_changed_settings,
    find_missing_modes,
    find_not_lossless,
    has_same_prompts,
)
from infer.comparison.metric_changes import MetricChange, compare_metrics, has_several_runs
from infer.report.number_format import ABSENT, Table, choose_console, to_rich_table
from infer.results.schema import SCHEMA_VERSION, Report
from models.io.console import CONSOLE
from models.io.errors import UserError, require

DECIMALS = {"tokens/s": 1, "acceptance rate": 3}


def parse_report(content: Any, file: Path) -> Report:
    """Return the report in a file's JSON content; raise UserError if its schema differs."""
    remedy = "measure again with python -m infer.eval"
    version = content.get("schema_version") if isinstance(content, dict) else None
    require(
        version == SCHEMA_VERSION,
        f"report: must be of schema version {SCHEMA_VERSION}, got {version} in {file}; {remedy}",
    )
    mismatch = "report: must match docs/report.schema.json, got"
    try:
        report = TypeAdapter(Report).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{mismatch} {place}: {first['msg']} in {file}; {remedy}") from error
    missing = [key for row in report.per_prompt for key in report.overall.modes if key not in row.modes]
    require(not missing, f"{mismatch} no '{''.join(missing[:1])}' in {file}; {remedy}")
    return report


def compare_reports(before: Sequence[Report], after: Sequence[Report]) -> tuple[list[str], Table, list[str]]:
    """Return the changed settings, a table of changed metrics, and the regressions.

    A side is several reports if its measurement was repeated. Falls of tau are regressions; those of speed-up are
    if each side has several reports. Raise UserError if the reports are of different prompts.
    """
    first, others = before[0], [*before[1:], *after]
    for number, report in enumerate(others, start=2):
        require(
            has_same_prompts(first, report),
            f"report: must hold the prompts of the first report, got others in number {number} of "
            f"{1 + len(others)}; measure again with one evaluation.prompts",
        )
    changes = list(compare_metrics(before, after))
    not_lossless = {name: pair for report in after for name, pair in find_not_lossless(first, report).items()}
    missing = {name: why for report in after for name, why in find_missing_modes(first, report).items()}
    regressions = [
        *(f"{change.mode} {change.metric}" for change in changes if change.is_regression),
        *(f"{name} lossless: {verdict}" for name, (_, verdict) in not_lossless.items()),
        *(f"{name} is no longer measured" + (f" ({reason})" if reason else "") for name, reason in missing.items()),
    ]
    settings = [line for report in others for line in find_changed_settings(first, report)]
    note = f"Differences are paired by prompt. {_describe_intervals(several=has_several_runs(before, after))}"
    table = _build_table(changes, not_lossless, list(missing), note)
    return list(dict.fromkeys(settings)), table, regressions


def _describe_intervals(*, several: bool) -> str:
    """Say what a regression is by, what its interval holds, and what was left out."""
    if several:
        judged, noise = "tau and speed-up", "They hold the noise between prompts and between runs."
    else:
        judged = "tau"
        noise = "Speed is shown and not judged, because one report of each side does not show the noise between runs: "
        noise += "give several, BEFORE... -- AFTER..."
    return (
        f"Brackets: intervals of the differences. If nothing changed, those of {judged} all contain 0 in at least 95 % "
        f"of comparisons. {noise}"
    )


def _build_table(changes: list[MetricChange], not_lossless: VerdictPairs, missing: list[str], note: str) -> Table:
    return Table(
        title="Figures",
        note=note,
        columns=["mode", "figure", "before", "after", "difference", "beyond noise"],
        rows=[
            *map(_format_change, changes),
            *(
                [name, "lossless", before or ABSENT, after, ABSENT, "must be yes"]
                for name, (before, after) in not_lossless.items()
            ),
            *([name, "measured", "yes", "NO", ABSENT, "worse"] for name in missing),
        ],
        label_columns=2,
    )


def _format_change(change: MetricChange) -> list[str]:
    decimals = DECIMALS.get(change.metric, 2)
    difference = f"{change.after - change.before:+.{decimals}f}"
    low, high = change.interval or (None, None)
    interval = "[?]" if low is None else f"[{low:.{decimals}f}, {high:.{decimals}f}]"
    verdict = "better" if change.after > change.before else "worse"
    calm = "unknown" if change.interval is None else "no"
    return [
        change.mode,
        change.metric,
        f"{change.before:.{decimals}f}",
        f"{change.after:.{decimals}f}",
        f"{difference} {interval}",
        verdict if change.is_beyond_noise else calm,
    ]


def print_comparison(settings: list[str], table: Table, regressions: list[str]) -> None:
    console = choose_console(CONSOLE)
    print_text = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    heading = "settings that differ:" if settings else "settings: all the same"
    print_text("\n  ".join([heading, *settings]))
    console.print()
    console.print(to_rich_table(table, ruled=console.is_terminal))
    console.print(table.note, style="dim", markup=False, highlight=False)
    print_text(f"\nregression: {'; '.join(regressions)}" if regressions else "\nno regression beyond noise")
