"""What became of every row: report.json and report.md of a prepared folder, and its prompt file."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.answers.answering import AnswersReport
from data.mixture.config import MixtureConf
from data.mixture.gather import Gathered
from data.mixture.limits import first_prompt
from data.sources.prepared_rows import Row, read, read_notes

HELD_OUT, TRAIN = SPLITS = ("held_out", "train")
REPORT, PAGE, PROMPTS = "report.json", "report.md", "held_out.jsonl"


@dataclass(kw_only=True)
class SourceReport:
    """Rows of one source: read = train + held_out + dropped."""

    path: str
    read: int
    train: int = 0
    held_out: int = 0
    share_asked: float | None = None
    share: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # of a reason: the first place
    licences: Counter[str] = field(default_factory=Counter)

    @property
    def taken(self) -> int:
        return self.train + self.held_out


def path_of(folder: Path, split: str, worker: int, workers: int) -> Path:
    return folder / f"{split}-{worker:05d}-of-{workers:05d}.parquet"


def files_of(folder: Path, workers: int) -> list[Path]:
    """All that the workers write."""
    return [
        path_of(folder, split, worker, workers) for split in SPLITS for worker in range(workers)
    ]


def source_reports(
    mixture: MixtureConf, gathered: dict[str, Gathered], dropped: dict[str, Counter[str]]
) -> dict[str, SourceReport]:
    """What was read, and what was left before any file was written."""
    return {
        name: SourceReport(
            path=source.path, read=gathered[name].read, share_asked=source.share,
            dropped=gathered[name].dropped + dropped[name], examples=gathered[name].examples,
        )
        for name, source in mixture.sources.items()
    }  # fmt: skip


def sum_up(sources: dict[str, SourceReport], files: list[Path]) -> None:
    """Add what each of the files holds, and what answering its rows dropped."""
    for file in files:
        notes = read_notes(file)
        split = file.name.partition("-")[0]
        for name, source in sources.items():
            licences = notes["licences"].get(name, {})
            setattr(source, split, getattr(source, split) + sum(licences.values()))
            source.licences.update(licences)
            source.dropped.update(notes["dropped"].get(name, {}))
    taken = sum(source.taken for source in sources.values())
    for source in sources.values():
        source.share = source.taken / max(taken, 1)


def write_report(
    folder: Path, sources: dict[str, SourceReport], excluded: dict[str, int], own: Path,
    covered: str,
) -> None:  # fmt: skip
    """The report and the held-out prompts; each appears whole.

    `covered`: what a draft vocabulary has of the answers.
    """
    summed = {
        name: sum(getattr(source, name) for source in sources.values())
        for name in ("read", "train", "held_out")
    }
    dropped = sum((source.dropped for source in sources.values()), Counter[str]())
    answers = AnswersReport()
    for file in folder.glob(f"{TRAIN}-*.parquet"):
        answers.add(read_notes(file))
    content = {
        "schema_version": 1, **summed, "dropped": dropped.total(),
        "dropped_by_reason": dict(dropped.most_common()),
        "sources": {name: vars(source) for name, source in sources.items()},
        "excluded_prompts": excluded, "answers": answers.told(),
    }  # fmt: skip
    (own / PAGE).write_text(page(folder.name, sources, excluded) + said(answers) + covered)
    with (own / PROMPTS).open("w") as file:
        for row in read(folder, HELD_OUT):
            file.write(json.dumps(prompt_row(row)) + "\n")
    (own / REPORT).write_text(json.dumps(content, indent=1))
    for name in (PROMPTS, PAGE, REPORT):  # the last says that all is there
        (own / name).replace(folder / name)


def prompt_row(row: Row) -> dict[str, Any]:
    """Return the first prompt of the row as a line of a prompt file."""
    asked = {"text": row.text} if row.messages is None else {"messages": first_prompt(row)}
    rendered = {"category": row.category, "tools": row.tools, "template": row.template}
    return {"id": row.id, **asked, **{name: value for name, value in rendered.items() if value}}


def _line(*cells: str) -> str:
    """Of a table."""
    written = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(written)} |"


def said(answers: AnswersReport) -> str:
    """What the target answered, for readers; nothing where it was not asked."""
    if not answers.rows:
        return ""
    return "\nAnswers by the target:\n\n" + "".join(f"* {line}\n" for line in answers.lines())


def page(name: str, sources: dict[str, SourceReport], excluded: dict[str, int]) -> str:
    """The report for readers."""
    lines = [
        f"# Prepared data: {name}", "",
        "| source | path | licence | read | to train on | held out | dropped | share | asked |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for title, one in sources.items():
        licences = ", ".join(name or "not said" for name in one.licences) or "-"
        asked = "all" if one.share_asked is None else f"{one.share_asked:g}"
        counts = (f"{n:,}" for n in (one.read, one.train, one.held_out, one.dropped.total()))
        lines.append(_line(title, one.path, licences, *counts, f"{one.share:.1%}", asked))
    lines += ["", "| source | rows dropped | reason | first |", "|---|---|---|---|"]
    for title, one in sources.items():
        lines += [
            _line(title, f"{count:,}", reason, one.examples.get(reason, ""))
            for reason, count in one.dropped.most_common()
            if count
        ]
    lines += ["", "Rows that ask what these held-out prompts ask were dropped:", ""]
    lines += [f"* {file}: {count:,} prompts" for file, count in excluded.items()] or ["* none"]
    return "\n".join(lines) + "\n"
