"""Concurrent generation of the target's answers to any number of rows, journaled row by row."""

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data.answers.dialogue import AnswerBackend, Dialogue, UnansweredError
from data.prepare_config import AnswersConf
from data.sources.prepared_rows import PreparedRow, row_from_columns, row_to_columns
from data.sources.rows import RowRejectedError
from models.io.console import track_progress
from models.io.errors import UserError, require
from models.io.files import report_disk_errors

log = logging.getLogger(__name__)
# Give up after this many consecutive permanent failures, or as many as there are rows in flight if
# that is more.
MIN_FAILURES_TO_ABORT = 8


class Journal:
    """An append-only file of one record per finished row, written by one process at a time.

    Opening it removes the torn last line that a killed process may leave. Its row, and that of a line that is damaged,
    are answered again.
    """

    def __init__(self, path: Path, file: BinaryIO):
        self._folder, self._file = path.parent, file
        self.offsets: dict[str, int] = {}  # where the line of each finished row begins
        self._end = 0
        file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):  # torn by a kill
                file.truncate(self._end)
                break
            with suppress(ValueError):
                self.offsets[json.loads(line)["id"]] = self._end
            self._end += len(line)

    def write(self, row_id: str, record: dict[str, Any]) -> None:
        """Append the record of a finished row."""
        line = json.dumps({"id": row_id, **record}).encode() + b"\n"
        with report_disk_errors(self._folder):
            self._file.write(line)
            self._file.flush()
        self.offsets[row_id] = self._end
        self._end += len(line)

    def read(self, row_id: str) -> dict[str, Any]:
        """Read the record of a row."""
        self._file.seek(self.offsets[row_id])
        return json.loads(self._file.readline())


@dataclass(kw_only=True)
class AnswersReport:
    """Counts of answered and dropped rows, taken from the journal and so over all runs."""

    target: str = ""  # whose answers they are; "" without answers
    tokenizer: str = ""  # fingerprint of the tokenizer of recorded ids
    rows: int = 0  # answered rows
    tokens: int = 0  # generated tokens
    finished: Counter[str] = field(default_factory=Counter)  # answers by finish reason
    retokenized: int = 0  # answers whose token ids were made from text
    ended: Counter[str] = field(default_factory=Counter)  # rows with turns left, by reason
    # rows of a source, by reason
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add_record(self, record: dict[str, Any]) -> None:
        """Add one record of the journal, an answered or a dropped row, to the counts."""
        if "dropped" in record:
            self.dropped[record["source"]][record["dropped"]] += 1
            return
        answers = record["row"]["answers"]
        self.rows += 1
        self.tokens += sum(answer["tokens"] for answer in answers)
        self.retokenized += sum(answer["retokenized"] for answer in answers)
        self.finished.update(answer["finish_reason"] for answer in answers)
        self.ended.update([record["ended"]] if record["ended"] else [])

    def merge_dict(self, counts: dict[str, Any]) -> None:
        """Add the fields of another report, such as those in the footer of a worker's file."""
        self.target, self.tokenizer = (counts.get(key) or getattr(self, key) for key in ("target", "tokenizer"))
        self.rows += counts["rows"]
        self.tokens += counts["tokens"]
        self.retokenized += counts["retokenized"]
        self.finished.update(counts["finished"])
        self.ended.update(counts["ended"])

    def summary_lines(self) -> list[str]:
        """Return the summary for the log and the report page, line by line."""
        if not self.rows:
            return []
        return [
            f"{self.finished.total():,} answers of {self.tokens:,} tokens in {self.rows:,} rows",
            *(f"{count:,} answers ended by {reason}" for reason, count in self.finished.most_common()),
            *([f"{self.retokenized:,} answers re-tokenized"] if self.retokenized else []),
            *(f"{count:,} rows shortened: {reason}" for reason, count in self.ended.items()),
        ]


def answer_rows(
    rows: Iterable[PreparedRow],
    backend: AnswerBackend,
    tokenizer: Any,
    conf: AnswersConf,
    journal: Path,
    *,
    report: AnswersReport,
    total: int,
) -> Iterator[PreparedRow]:
    """Answer the rows and yield them in their order; `report` is filled with the counts.

    Every row is answered, and the backend closed, before the first one is yielded. Raises UserError for permanent
    failures, which a file beside the journal lists, unless `conf.skip_failed` leaves them out.
    """
    with journal.open("a+b") as file:
        records = Journal(journal, file)
        job = _AnswerJob(backend=backend, tokenizer=tokenizer, conf=conf, journal=records)
        # Runner.run would delay Ctrl-C until a batch is decoded.
        with asyncio.Runner() as runner:
            row_ids = runner.get_loop().run_until_complete(job.answer_all(rows, total))
        job.report_failures(journal.with_suffix(".failed.jsonl"))
        for failure in job.failures.values():
            report.dropped[failure["source"]][f"failed: {failure['reason']}"] += 1
        for record in (records.read(row_id) for row_id in row_ids if row_id in records.offsets):
            report.add_record(record)
            if "row" in record:
                yield row_from_columns(record["row"])


@dataclass(kw_only=True)
class _AnswerJob:
    """The answering of one process's rows."""

    backend: AnswerBackend
    tokenizer: Any
    conf: AnswersConf
    journal: Journal
    # rows that failed permanently: source, reason and detail by the row's id
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    consecutive_failures: int = 0  # permanent failures since the last finished row
    is_aborted: bool = False  # True after too many consecutive failures: the rest is skipped

    async def answer_all(self, rows: Iterable[PreparedRow], total: int) -> list[str]:
        """Answer every row that the journal lacks, `conf.rows_in_flight` at a time; return the ids of all rows."""
        row_ids = []
        slots = asyncio.Semaphore(self.conf.rows_in_flight)
        if self.journal.offsets:
            log.info("answers: %s rows are already answered", f"{len(self.journal.offsets):,}")
        # Rows finish in any order: each takes one step of the bar, which the first `next` shows. A journal may hold
        # more rows than these, of an earlier choice: then any of these may be missing.
        missing = total - len(self.journal.offsets)
        steps: Any = iter(track_progress(range(missing if missing > 0 else total), "answers"))
        next(steps, None)
        try:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    row_ids.append(row.id)
                    if row.id in self.journal.offsets:
                        continue
                    await slots.acquire()
                    if self.is_aborted:
                        break
                    task = group.create_task(self._answer_row(row))
                    task.add_done_callback(lambda _: (slots.release(), next(steps, None)))
        except* UserError as errors:
            raise errors.exceptions[0] from None
        finally:
            steps.close()
            await self.backend.close()
        return row_ids

    async def _answer_row(self, row: PreparedRow) -> None:
        """Answer one row, and record it in the journal or, if it fails, in `failures`."""
        dialogue = Dialogue(row=row, backend=self.backend, tokenizer=self.tokenizer, conf=self.conf)
        try:
            answered = await dialogue.answer_turns()
        except UnansweredError as error:
            self.failures[row.id] = {"source": row.source, "reason": str(error), "detail": error.detail}
            self.consecutive_failures += 1
            self.is_aborted |= self.consecutive_failures >= max(MIN_FAILURES_TO_ABORT, self.conf.rows_in_flight)
            return
        except RowRejectedError as error:
            self.journal.write(row.id, {"source": row.source, "dropped": str(error)})
        else:
            self.journal.write(row.id, {"ended": dialogue.end_reason, "row": row_to_columns(answered)})
        self.consecutive_failures = 0

    def report_failures(self, file: Path) -> None:
        """Write the permanent failures, if any, to `file`; raise UserError for those that may not be left out."""
        if not self.failures:
            file.unlink(missing_ok=True)
            return
        rows = ({"id": row_id, **failure} for row_id, failure in self.failures.items())
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        reasons = Counter(failure["reason"] for failure in self.failures.values()).most_common()
        summary = (
            f"{len(self.failures):,} that failed for good "
            f"({', '.join(f'{count:,} {reason}' for reason, count in reasons)}), "
            f"{len(self.journal.offsets):,} done; listed in {file}"
        )
        remedy = "rerun for these" + ("" if self.is_aborted else ", or set answers.skip_failed=true")
        require(
            self.conf.skip_failed and not self.is_aborted,
            f"answers: every row must be answered, got {summary}; {remedy}",
        )
        log.warning("answers: left out %s", summary)
