"""The page to send home: a table of outcomes in Markdown, and the same in JSON."""

import json
from collections import Counter
from dataclasses import asdict
from datetime import date
from pathlib import Path

from models.io.pages import render_markdown_table
from train.device.checks import Outcome, Result

COLUMNS = ["check", "result", "seconds", "measured"]
MEANING = (
    "PASS: as on the CPU. FAIL: training or decoding needs it. ABSENT: the device lacks an operator that no graph of "
    "ours has. SKIP: not run, for the reason given."
)


def write_page(outcomes: list[Outcome], name: str, folder: Path) -> Path:
    """Write NAME.json and NAME.md into the folder; return the path of the second."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    page = folder / f"{name}.md"
    page.write_text(render_page(outcomes, name))
    return page


def render_page(outcomes: list[Outcome], name: str) -> str:
    """Return the page: a sentence of counts, a table for each stage, and the remedies of what failed."""
    parts = [
        f"# The device {name}",
        f"`python -m train.device device={name}`, {date.today()}: {count_results(outcomes)}.",
    ]
    for stage in dict.fromkeys(outcome.stage for outcome in outcomes):
        of_stage = [outcome for outcome in outcomes if outcome.stage == stage]
        rows = [[o.name, o.result, f"{o.seconds:.1f}", o.detail] for o in of_stage]
        remedies = [f"* {o.name}: {o.remedy}" for o in of_stage if o.result == Result.FAIL]
        table = render_markdown_table(COLUMNS, rows, label_columns=2)
        parts += [f"## {stage.capitalize()}", table, *(["\n".join(remedies)] if remedies else [])]
    return "\n\n".join([*parts, MEANING]) + "\n"


def count_results(outcomes: list[Outcome]) -> str:
    """Return how many checks had each result.

    >>> count_results([Outcome(stage="place", name="versions", result="PASS", seconds=0.1, detail="")])
    '1 PASS'
    """
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[result]} {result}" for result in Result if counts[result])
