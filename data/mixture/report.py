"""The report of a prepared folder (report.json, report.md) and its file of held-out prompts."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.answers.answering import AnswersReport
from data.mixture.config import MixtureConf
from data.mixture.gather import IngestStats
from data.mixture.limits import extract_first_prompt
from data.sources.prepared_rows import PreparedRow, read_prepared_metadata, read_prepared_rows

HELD_OUT, TRAIN = SPLITS = ("held_out", "train")
REPORT_FILE, REPORT_PAGE_FILE, PROMPTS_FILE = "report.json", "report.md", "held_out.jsonl"


@dataclass(kw_only=True)
class SourceReport:
    """Row counts of one source: read = train + held_out + dropped."""

    path: str
    read: int
    train: int = 0
    held_out: int = 0
    share_asked: float | None = None
    share: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # by reason: the first location
    licences: Counter[str] = field(default_factory=Counter)

    @property
    def selected(self) -> int:
        """Return the number of rows in both splits."""
        return self.train + self.held_out


def part_file_path(folder: Path, split: str, worker: int, workers: int) -> Path:
    """Return the path of one worker's file of a split."""
    return folder / f"{split}-{worker:05d}-of-{workers:05d}.parquet"


def list_part_files(folder: Path, workers: int) -> list[Path]:
    """List the files that all workers together write."""
    return [
        part_file_path(folder, split, worker, workers)
        for split in SPLITS
        for worker in range(workers)
    ]


def build_source_reports(
    mixture: MixtureConf, stats: dict[str, IngestStats], dropped: dict[str, Counter[str]]
) -> dict[str, SourceReport]:
    """Build each source's report from its ingest counts and the rows dropped by selection."""
    return {
        name: SourceReport(
            path=source.path, read=stats[name].read, share_asked=source.share,
            dropped=stats[name].dropped + dropped[name], examples=stats[name].examples,
        )
        for name, source in mixture.sources.items()
    }  # fmt: skip


def add_file_counts(sources: dict[str, SourceReport], files: list[Path]) -> None:
    """Add the row counts of each file, and the rows dropped while answering them."""
    for file in files:
        metadata = read_prepared_metadata(file)
        split = file.name.partition("-")[0]
        for name, source in sources.items():
            licences = metadata["licences"].get(name, {})
            setattr(source, split, getattr(source, split) + sum(licences.values()))
            source.licences.update(licences)
            source.dropped.update(metadata["dropped"].get(name, {}))
    total = sum(source.selected for source in sources.values())
    for source in sources.values():
        source.share = source.selected / max(total, 1)


def write_prepare_report(
    folder: Path, sources: dict[str, SourceReport], excluded: dict[str, int],
    worker_dir: Path, coverage_section: str,
) -> None:  # fmt: skip
    """Write the report and the held-out prompts, each file atomically.

    `coverage_section`: the report's section on draft vocabularies.
    """
    totals = {
        name: sum(getattr(source, name) for source in sources.values())
        for name in ("read", "train", "held_out")
    }
    dropped = sum((source.dropped for source in sources.values()), Counter[str]())
    answers = AnswersReport()
    for file in folder.glob(f"{TRAIN}-*.parquet"):
        answers.merge_dict(read_prepared_metadata(file))
    content = {
        "schema_version": 1, **totals, "dropped": dropped.total(),
        "dropped_by_reason": dict(dropped.most_common()),
        "sources": {name: vars(source) for name, source in sources.items()},
        "excluded_prompts": excluded, "answers": answers.to_dict(),
    }  # fmt: skip
    (worker_dir / REPORT_PAGE_FILE).write_text(
        render_prepare_report(folder.name, sources, excluded)
        + format_answer_summary(answers)
        + coverage_section
    )
    with (worker_dir / PROMPTS_FILE).open("w") as file:
        for row in read_prepared_rows(folder, HELD_OUT):
            file.write(json.dumps(prompt_row_from_prepared(row)) + "\n")
    (worker_dir / REPORT_FILE).write_text(json.dumps(content, indent=1))
    for name in (PROMPTS_FILE, REPORT_PAGE_FILE, REPORT_FILE):  # the last marks completion
        (worker_dir / name).replace(folder / name)


def prompt_row_from_prepared(row: PreparedRow) -> dict[str, Any]:
    """Return the first prompt of the row as a row of a prompt file."""
    prompt = {"text": row.text} if row.messages is None else {"messages": extract_first_prompt(row)}
    optional = {"category": row.category, "tools": row.tools, "template": row.template}
    return {"id": row.id, **prompt, **{name: value for name, value in optional.items() if value}}


def _format_table_row(*cells: str) -> str:
    """Format a row of a Markdown table; escape what would break it."""
    escaped = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def format_answer_summary(answers: AnswersReport) -> str:
    """Format the section on the target's answers; empty if it gave none."""
    if not answers.rows:
        return ""
    return "\nAnswers by the target:\n\n" + "".join(
        f"* {line}\n" for line in answers.summary_lines()
    )


def render_prepare_report(
    name: str, sources: dict[str, SourceReport], excluded: dict[str, int]
) -> str:
    """Render report.md without its sections on answers and vocabularies."""
    lines = [
        f"# Prepared data: {name}", "",
        "| source | path | license | read | train | held out | dropped | share | requested |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for title, source in sources.items():
        licenses = ", ".join(name or "not stated" for name in source.licences) or "-"
        requested = "all" if source.share_asked is None else f"{source.share_asked:g}"
        counts = (
            f"{n:,}" for n in (source.read, source.train, source.held_out, source.dropped.total())
        )
        lines.append(
            _format_table_row(
                title, source.path, licenses, *counts, f"{source.share:.1%}", requested
            )
        )
    lines += ["", "| source | rows dropped | reason | first |", "|---|---|---|---|"]
    for title, source in sources.items():
        lines += [
            _format_table_row(title, f"{count:,}", reason, source.examples.get(reason, ""))
            for reason, count in source.dropped.most_common()
            if count
        ]
    lines += ["", "Rows that repeat a held-out prompt of these files were dropped:", ""]
    lines += [f"* {file}: {count:,} prompts" for file, count in excluded.items()] or ["* none"]
    return "\n".join(lines) + "\n"
