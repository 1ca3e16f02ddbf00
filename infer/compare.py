"""Compare two reports: what changed, and which figures moved beyond noise.

python -m infer.compare BEFORE/report.json AFTER/report.json

Exit code 1 means a regression: tau or speed-up fell beyond noise, the answers of the second report
are not shown to be lossless, or a mode is no longer measured.
"""

import json
import sys
from pathlib import Path
from typing import Any

from conf.entry import exit_with_error
from models.errors import UserError, require

USAGE = "python -m infer.compare BEFORE/report.json AFTER/report.json"


def read_json(path: Path) -> tuple[Any, Path]:
    """Return the content of a report.json, or of the one in a directory, and the file."""
    file = path / "report.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8")), file
    except (OSError, ValueError) as error:
        raise UserError(f"report: must be a readable report.json, got {file}; {USAGE}") from error


def compare_files(before: Path, after: Path) -> int:
    """Print the comparison of two reports and return the exit code."""
    contents = [read_json(before), read_json(after)]
    from infer.report.comparison import compare_reports, parse_report, print_comparison

    settings, table, regressions = compare_reports(*(parse_report(*each) for each in contents))
    print_comparison(settings, table, regressions)
    return int(bool(regressions))


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code; a user's mistake exits with code 2."""
    try:
        require(
            len(arguments) == 2,
            f"command line: must be two reports, got {len(arguments)}; {USAGE}",
        )
        return compare_files(*map(Path, arguments))
    except UserError as error:
        exit_with_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
