"""Compare two reports: what changed, and which figures moved beyond noise.

python -m infer.compare BEFORE/report.json AFTER/report.json

Exit code 1: a regression (tau or speed-up fell beyond noise, the second report does not say that
answers are lossless, or a mode is no longer measured).
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from conf.entry import refuse
from infer.measure.report import SCHEMA_VERSION
from infer.report.diff import (
    Move,
    Verdicts,
    find_not_lossless,
    gone,
    moves,
    paired,
    read_whole,
    settings_changed,
)
from infer.report.number_format import ABSENT, Table, rich_table
from infer.report.views import Report
from models.errors import UserError

USAGE = "python -m infer.compare BEFORE/report.json AFTER/report.json"
DECIMALS = {"tokens/s": 1, "acceptance rate": 3}


def read_report(path: Path) -> Report:
    """A report of this schema. Raises UserError for anything else."""
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
        read_whole(report)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else f"other values ({error})"
        raise UserError(
            f"report: must hold what docs/report.schema.json says, got {what.splitlines()[0]} in "
            f"{file}; measure again with python -m infer.eval"
        ) from error
    return report


def compare(before: Report, after: Report) -> tuple[list[str], Table, list[str]]:
    """What changed, the figures, and the regressions."""
    found = list(moves(before, after))
    changed = settings_changed(before, after)
    lost = find_not_lossless(before, after)
    missing = gone(before, after)
    regressions = [f"{move.mode} {move.figure}" for move in found if move.regression]
    regressions += [f"{name} lossless: {verdict}" for name, (_, verdict) in lost.items()]
    regressions += [
        f"{name} is no longer measured" + (f" ({reason})" if reason else "")
        for name, reason in missing.items()
    ]
    return changed, _table(found, lost, list(missing), same=paired(before, after)), regressions


def _table(found: list[Move], lost: Verdicts, missing: list[str], *, same: bool) -> Table:
    how = "paired by prompt" if same else "unpaired: the reports hold different prompts"
    rows = [_row(move) for move in found]
    rows += [
        [name, "lossless", before or ABSENT, after, ABSENT, "must be yes"]
        for name, (before, after) in lost.items()
    ]
    rows += [[name, "measured", "yes", "NO", ABSENT, "worse"] for name in missing]
    return Table(
        title="Figures",
        note=f"Differences are {how}. Brackets: intervals beyond which tau and speed-up of all "
        "modes together stray in at most 5 % of comparisons where nothing changed.",
        columns=["mode", "figure", "before", "after", "difference", "beyond noise"],
        rows=rows,
        labels=2,
    )


def _row(move: Move) -> list[str]:
    places = DECIMALS.get(move.figure, 2)
    apart = f"{move.after - move.before:+.{places}f}"
    low, high = move.interval or (None, None)
    within = "[?]" if low is None else f"[{low:.{places}f}, {high:.{places}f}]"
    verdict = "better" if move.after > move.before else "worse"
    return [
        move.mode,
        move.figure,
        f"{move.before:.{places}f}",
        f"{move.after:.{places}f}",
        f"{apart} {within}",
        verdict if move.beyond_noise else "no",
    ]


def _show(changed: list[str], table: Table, regressions: list[str]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=100, color_system=None)
    say = console.print
    say("settings that differ:" if changed else "settings: all the same", highlight=False)
    for line in changed:
        say(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    say()
    say(rich_table(table, ruled=console.is_terminal))
    say(table.note, style="dim", markup=False, highlight=False)
    said = f"regression: {'; '.join(regressions)}" if regressions else "no regression beyond noise"
    say(f"\n{said}", markup=False, highlight=False, soft_wrap=True)


def main(arguments: list[str]) -> int:
    """The exit code; what a user gets wrong ends the process with code 2."""
    try:
        if len(arguments) != 2:
            raise UserError(f"command line: must be two reports, got {len(arguments)}; {USAGE}")
        before, after = (read_report(Path(argument)) for argument in arguments)
    except UserError as error:
        refuse(error)
    changed, table, regressions = compare(before, after)
    _show(changed, table, regressions)
    return int(bool(regressions))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
