"""The report of a prepared folder (report.json, report.md) and its file of held-out prompts."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Template

from data.answers.answering import AnswersReport
from data.mixture.filters import extract_first_prompt
from data.mixture.gather import IngestStats
from data.sources.prepared_rows import PreparedRow, read_prepared_metadata, read_prepared_rows
from models.files import write_text_atomically

HELD_OUT, TRAIN = SPLITS = ("held_out", "train")
REPORT_FILE, REPORT_PAGE_FILE, PROMPTS_FILE = "report.json", "report.md", "held_out.jsonl"
PAGE_TEMPLATE = Template(  # Markdown, so that nothing is escaped for HTML
    r"""# Prepared data: {{ name }}

| source | path | license | read | train | held out | dropped | share | requested |
|---|---|---|---|---|---|---|---|---|
{% for title, source in sources.items() %}
{% set licenses = source.licenses | map("default", "not stated", true) | join(", ") %}
{{ row(title, source.path, licenses or "-", source.read, source.train, source.held_out,
       source.dropped.total(), "{:.1%}".format(source.share),
       "all" if source.share_asked is none else "{:g}".format(source.share_asked)) }}
{% endfor %}

| source | rows dropped | reason | first |
|---|---|---|---|
{% for title, source in sources.items() %}
{% for reason, count in source.dropped.most_common() if count %}
{{ row(title, count, reason, source.examples.get(reason, "")) }}
{% endfor %}
{% endfor %}

Rows that repeat a held-out prompt of these files were dropped:

{% for file, count in excluded.items() %}
* {{ file }}: {{ "{:,}".format(count) }} prompts
{% else %}
* none
{% endfor %}
{% if answers.rows %}

Answers by the target:

{% for line in answers.summary_lines() %}
* {{ line }}
{% endfor %}
{% endif %}
{{ coverage_section }}""",
    trim_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(kw_only=True)
class SourceReport(IngestStats):
    """The row counts of one source at the end: read = train + held_out + dropped."""

    path: str
    train: int = 0
    held_out: int = 0
    share_asked: float | None = None
    share: float = 0.0
    licenses: Counter[str] = field(default_factory=Counter)


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


def write_prepare_report(
    folder: Path, workers: int, sources: dict[str, SourceReport], excluded: dict[str, int],
    worker_dir: Path, coverage_section: str,
) -> None:  # fmt: skip
    """Add the counts of all workers' files; write the report and the held-out prompts.

    Each file is written atomically, and the report last: it marks a finished folder.
    `coverage_section` is the report's section on draft vocabularies.
    """
    answers = _add_file_counts(sources, list_part_files(folder, workers))
    dropped = sum((source.dropped for source in sources.values()), Counter[str]())
    content = {
        "schema_version": 1,
        "read": sum(source.read for source in sources.values()),
        "train": sum(source.train for source in sources.values()),
        "held_out": sum(source.held_out for source in sources.values()),
        "dropped": dropped.total(),
        "dropped_by_reason": dict(dropped.most_common()),
        "sources": {name: vars(source) for name, source in sources.items()},
        "excluded_prompts": excluded, "answers": answers.to_dict(),
    }  # fmt: skip
    prompts = map(prompt_row_from_prepared, read_prepared_rows(folder, HELD_OUT))
    lines = "".join(f"{json.dumps(prompt)}\n" for prompt in prompts)
    write_text_atomically(folder / PROMPTS_FILE, lines, partial_dir=worker_dir)
    page = PAGE_TEMPLATE.render(
        name=folder.name, sources=sources, excluded=excluded, answers=answers,
        coverage_section=coverage_section, row=_format_table_row,
    )  # fmt: skip
    write_text_atomically(folder / REPORT_PAGE_FILE, page, partial_dir=worker_dir)
    write_text_atomically(
        folder / REPORT_FILE, json.dumps(content, indent=1), partial_dir=worker_dir
    )


def _add_file_counts(sources: dict[str, SourceReport], files: list[Path]) -> AnswersReport:
    """Add each file's rows, and the rows dropped while answering; return the answers' counts."""
    answers = AnswersReport()
    for file in files:
        metadata = read_prepared_metadata(file)
        answers.merge_dict(metadata)
        split = file.name.partition("-")[0]
        for name, source in sources.items():
            licenses = metadata["licenses"].get(name, {})
            setattr(source, split, getattr(source, split) + sum(licenses.values()))
            source.licenses.update(licenses)
            source.dropped.update(metadata["dropped"].get(name, {}))
    total = sum(source.train + source.held_out for source in sources.values())
    for source in sources.values():
        source.share = (source.train + source.held_out) / max(total, 1)
    return answers


def prompt_row_from_prepared(row: PreparedRow) -> dict[str, Any]:
    """Return the first prompt of the row as a row of a prompt file."""
    prompt = {"text": row.text} if row.messages is None else {"messages": extract_first_prompt(row)}
    optional = {"category": row.category, "tools": row.tools, "template": row.template}
    return {"id": row.id, **prompt, **{name: value for name, value in optional.items() if value}}


def _format_table_row(*cells: str | int) -> str:
    """Format a row of a Markdown table; escape what would break it."""
    texts = [f"{cell:,}" if isinstance(cell, int) else cell for cell in cells]
    return "| " + " | ".join(" ".join(text.split()).replace("|", "\\|") for text in texts) + " |"
