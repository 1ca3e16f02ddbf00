"""Compare two reports: what changed, and which figures moved beyond noise.

python -m infer.compare BEFORE/report.json AFTER/report.json

Exit code 1 means a regression: tau or speed-up fell beyond noise, the answers of the second report
are not shown to be lossless, or a mode is no longer measured.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from conf.entry import exit_with_error
from infer.measure.report import SCHEMA_VERSION
from infer.report.diff import (
    MetricChange,
    VerdictPairs,
    check_report_fields,
    compare_metrics,
    find_changed_settings,
    find_missing_modes,
    find_not_lossless,
    has_same_prompts,
)
from infer.report.number_format import ABSENT, Table, to_rich_table
from infer.report.views import ReportDict
from models.errors import UserError

USAGE = "python -m infer.compare BEFORE/report.json AFTER/report.json"
DECIMALS = {"tokens/s": 1, "acceptance rate": 3}


def read_report(path: Path) -> ReportDict:
    """Read a report.json, or the one in a directory; raise UserError if it has another schema."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"report: must be a readable report.json, got {file}; {USAGE}") from error
    version = report.get("schema_version") if isinstance(report, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"report: must be of schema version {SCHEMA_VERSION}, got {version} in {file}; "
            "measure again with python -m infer.eval"
        )
    try:
        check_report_fields(report)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else f"invalid values ({error})"
        raise UserError(
            f"report: must match docs/report.schema.json, got {problem.splitlines()[0]} in "
            f"{file}; measure again with python -m infer.eval"
        ) from error
    return report


def compare_reports(before: ReportDict, after: ReportDict) -> tuple[list[str], Table, list[str]]:
    """Return the changed settings, a table of changed metrics, and the regressions."""
    changes = list(compare_metrics(before, after))
    settings = find_changed_settings(before, after)
    not_lossless = find_not_lossless(before, after)
    missing = find_missing_modes(before, after)
    regressions = [f"{change.mode} {change.metric}" for change in changes if change.is_regression]
    regressions += [f"{name} lossless: {verdict}" for name, (_, verdict) in not_lossless.items()]
    regressions += [
        f"{name} is no longer measured" + (f" ({reason})" if reason else "")
        for name, reason in missing.items()
    ]
    return (
        settings,
        _build_table(changes, not_lossless, list(missing), same=has_same_prompts(before, after)),
        regressions,
    )


def _build_table(
    changes: list[MetricChange], not_lossless: VerdictPairs, missing: list[str], *, same: bool
) -> Table:
    pairing = "paired by prompt" if same else "unpaired: the reports hold different prompts"
    rows = [_format_move(change) for change in changes]
    rows += [
        [name, "lossless", before or ABSENT, after, ABSENT, "must be yes"]
        for name, (before, after) in not_lossless.items()
    ]
    rows += [[name, "measured", "yes", "NO", ABSENT, "worse"] for name in missing]
    return Table(
        title="Figures",
        note=f"Differences are {pairing}. Brackets: intervals that the tau and speed-up of all "
        "modes together leave in at most 5 % of comparisons where nothing changed.",
        columns=["mode", "figure", "before", "after", "difference", "beyond noise"],
        rows=rows,
        label_columns=2,
    )


def _format_move(change: MetricChange) -> list[str]:
    decimals = DECIMALS.get(change.metric, 2)
    difference = f"{change.after - change.before:+.{decimals}f}"
    low, high = change.interval or (None, None)
    interval = "[?]" if low is None else f"[{low:.{decimals}f}, {high:.{decimals}f}]"
    verdict = "better" if change.after > change.before else "worse"
    return [
        change.mode,
        change.metric,
        f"{change.before:.{decimals}f}",
        f"{change.after:.{decimals}f}",
        f"{difference} {interval}",
        verdict if change.is_beyond_noise else "no",
    ]


def _print_comparison(settings: list[str], table: Table, regressions: list[str]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=100, color_system=None)
    print_text = console.print
    print_text("settings that differ:" if settings else "settings: all the same", highlight=False)
    for line in settings:
        print_text(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    print_text()
    print_text(to_rich_table(table, ruled=console.is_terminal))
    print_text(table.note, style="dim", markup=False, highlight=False)
    verdict = (
        f"regression: {'; '.join(regressions)}" if regressions else "no regression beyond noise"
    )
    print_text(f"\n{verdict}", markup=False, highlight=False, soft_wrap=True)


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code; a user's mistake exits with code 2."""
    try:
        if len(arguments) != 2:
            raise UserError(f"command line: must be two reports, got {len(arguments)}; {USAGE}")
        before, after = (read_report(Path(argument)) for argument in arguments)
    except UserError as error:
        exit_with_error(error)
    settings, table, regressions = compare_reports(before, after)
    _print_comparison(settings, table, regressions)
    return int(bool(regressions))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
