"""Compare two reports, or several of each side: what changed, and what moved beyond noise.

python -m infer.compare BEFORE/report.json AFTER/report.json
python -m infer.compare BEFORE-1 BEFORE-2 BEFORE-3 -- AFTER-1 AFTER-2 AFTER-3

Exit code 1 means a regression: tau fell beyond noise, the answers after are not shown to be
lossless, or a mode is no longer measured. With several reports of each side, which show the noise
between runs, a fall of the speed-up is one too.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.entry import exit_with_error
from models.io.errors import UserError, require

USAGE = "python -m infer.compare BEFORE... -- AFTER..."


def read_json(path: Path) -> tuple[Any, Path]:
    """Return the content of a report.json, or of the one in a directory, and the file."""
    file = path / "report.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8")), file
    except (OSError, ValueError) as error:
        raise UserError(f"report: must be a readable report.json, got {file}; {USAGE}") from error


def parse_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the reports of both sides; two need no `--` between them. Raise UserError if a side has no report."""
    words = [*arguments]
    if len(words) == 2 and "--" not in words:
        words.insert(1, "--")
    require(
        words.count("--") == 1 and "--" not in (words[0], words[-1]),
        "command line: must be two reports, or several of each side with -- between the sides, "
        f"got {shlex.join(words) or 'none'}; {USAGE}",
    )
    middle = words.index("--")
    return [Path(word) for word in words[:middle]], [Path(word) for word in words[middle + 1 :]]


def compare_files(before: list[Path], after: list[Path]) -> int:
    """Print the comparison of the reports of two sides and return the exit code."""
    contents = [[read_json(path) for path in side] for side in (before, after)]
    from infer.comparison.page import compare_reports, parse_report, print_comparison

    sides = [[parse_report(*each) for each in side] for side in contents]
    settings, table, regressions = compare_reports(*sides)
    print_comparison(settings, table, regressions)
    return int(bool(regressions))


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code; a user's mistake exits with code 2."""
    if {"-h", "--help"} & {*arguments}:
        sys.stdout.write(__doc__ or "")
        return 0
    try:
        return compare_files(*parse_arguments(arguments))
    except UserError as error:
        exit_with_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
