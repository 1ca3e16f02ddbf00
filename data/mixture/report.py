"""The report of a prepared folder (report.json, report.md) and its file of held-out prompts."""

import json
from collections import Counter
from pathlib import Path

from jinja2 import Template

from data.answers.answering import AnswersReport
from data.chat.prepared_prompts import prompt_row_from_prepared
from data.mixture.gather import SourceReport
from data.sources.prepared_rows import HELD_OUT, TRAIN, read_prepared_metadata, read_prepared_rows
from models.io.files import write_text_atomically

COUNTS = ("read", TRAIN, HELD_OUT)
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
""",
    trim_blocks=True,
    keep_trailing_newline=True,
)


def train_file(folder: Path, worker: int, workers: int) -> Path:
    """Return the path of one worker's rows to train on."""
    return folder / f"{TRAIN}-{worker:05d}-of-{workers:05d}.parquet"


def write_prepare_report(
    folder: Path, files: list[Path], sources: dict[str, SourceReport], excluded: dict[str, int]
) -> None:
    """Add the counts of all files; write the report and the held-out prompts.

    The report is written last: it marks a finished folder.
    """
    answers = _add_file_counts(sources, files)
    dropped = sum((source.dropped for source in sources.values()), Counter[str]())
    content = {
        "schema_version": 1,
        **{name: sum(vars(source)[name] for source in sources.values()) for name in COUNTS},
        "dropped": dropped.total(),
        "dropped_by_reason": dict(dropped.most_common()),
        "sources": {name: vars(source) for name, source in sources.items()},
        "excluded_prompts": excluded,
        # `dropped` is counted in the sources
        "answers": {name: n for name, n in vars(answers).items() if name != "dropped"},
    }
    prompts = map(prompt_row_from_prepared, read_prepared_rows(folder, HELD_OUT))
    lines = "".join(f"{json.dumps(prompt)}\n" for prompt in prompts)
    write_text_atomically(folder / PROMPTS_FILE, lines)
    page = PAGE_TEMPLATE.render(
        name=folder.name, sources=sources, excluded=excluded, answers=answers, row=_format_table_row
    )
    write_text_atomically(folder / REPORT_PAGE_FILE, page)
    write_text_atomically(folder / REPORT_FILE, json.dumps(content, indent=1))


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


def _format_table_row(*cells: str | int) -> str:
    """Format a row of a Markdown table; escape what would break it."""
    texts = [f"{cell:,}" if isinstance(cell, int) else cell for cell in cells]
    return "| " + " | ".join(" ".join(text.split()).replace("|", "\\|") for text in texts) + " |"
