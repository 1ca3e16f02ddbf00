"""The report of a prepared folder (report.json, report.md) and its file of held-out prompts."""

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from data.answers.answering import AnswersReport
from data.chat.prepared_prompts import prompt_row_from_prepared
from data.mixture.gather import SourceReport
from data.sources.prepared_rows import HELD_OUT, TRAIN, read_prepared_metadata, read_prepared_rows
from models.io.files import write_text_atomically
from models.io.pages import render_markdown_table
from models.io.tracking import TrackedResults

COUNTS = ("read", TRAIN, HELD_OUT, "dropped")
REPORT_FILE, REPORT_PAGE_FILE, PROMPTS_FILE = "report.json", "report.md", "held_out.jsonl"
SOURCE_COLUMNS = ("source", "path", "license", "read", "train", "held out", "dropped", "share", "requested")


def train_file(folder: Path, worker: int, workers: int) -> Path:
    """Return the path of one worker's rows to train on."""
    return folder / f"{TRAIN}-{worker:05d}-of-{workers:05d}.parquet"


def write_prepare_report(
    folder: Path, files: list[Path], sources: dict[str, SourceReport], excluded: dict[str, int]
) -> None:
    """Add the counts of all files; write the held-out prompts and, last, the report: it marks a finished folder."""
    answers = _add_file_counts(sources, files)
    dropped = sum((source.dropped for source in sources.values()), Counter[str]())
    content = {
        "schema_version": 1,
        **{name: sum(vars(source)[name] for source in sources.values()) for name in COUNTS[:3]},
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
    write_text_atomically(folder / REPORT_PAGE_FILE, _render_page(folder.name, sources, excluded, answers))
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


def _render_page(name: str, sources: dict[str, SourceReport], excluded: dict[str, int], answers: AnswersReport) -> str:
    """Return the report as Markdown."""
    rows, drops = [], []
    for title, source in sources.items():
        licenses = ", ".join(license or "not stated" for license in source.licenses) or "-"
        counts = (source.read, source.train, source.held_out, source.dropped.total())
        requested = "all" if source.share_asked is None else f"{source.share_asked:g}"
        counted = [f"{count:,}" for count in counts]
        rows.append([title, source.path, licenses, *counted, f"{source.share:.1%}", requested])
        drops += [
            [title, reason, source.examples.get(reason, ""), f"{count:,}"]
            for reason, count in source.dropped.most_common()
            if count
        ]
    parts = [
        f"# Prepared data: {name}",
        _render_table(SOURCE_COLUMNS, rows),
        _render_table(("source", "reason", "first", "rows dropped"), drops),
        "Rows that repeat a held-out prompt of these files were dropped:",
        "\n".join(f"* {file}: {count:,} prompts" for file, count in excluded.items()) or "* none",
    ]
    if answers.rows:
        parts += ["Answers by the target:", "\n".join(f"* {line}" for line in answers.summary_lines())]
    return "\n\n".join(parts) + "\n"


def _render_table(columns: Sequence[str], rows: list[list[str]]) -> str:
    """Return a table whose texts, which come from the data, are one line each."""
    return render_markdown_table(columns, [[" ".join(cell.split()) for cell in row] for row in rows], label_columns=3)


def collect_results(folder: Path) -> TrackedResults:
    """Return the results of a finished folder for W&B: counts, sources and page."""
    report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    page = (folder / REPORT_PAGE_FILE).read_text(encoding="utf-8")
    return TrackedResults(
        prefix="prepare_report",
        figures={name: report[name] for name in COUNTS},
        columns=["source", "path", "read", "train", "held_out"],
        rows=[
            [name, *(str(source[key]) for key in ("path", "read", "train", "held_out"))]
            for name, source in report["sources"].items()
        ],
        page=f"<pre>{escape(page)}</pre>",  # Markdown, which is readable as it is
    )
