"""Answers by the target to any number of rows: many at a time, each kept as soon as it is whole.

A run that was killed goes on where its journal ends. A row is answered exactly once: it is in the
journal whole, or it is asked again.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.answers.config import AnswersConf
from data.answers.dialogue import Asker, Dialogue, UnansweredError
from data.answers.journal import Journal
from data.progress import Progress
from data.sources.prepared_rows import Row, record, row_of
from data.sources.row_formats import MisfitError
from models.errors import UserError

log = logging.getLogger(__name__)
HOPELESS = 8  # failures for good without an answer between them, and no fewer than rows in flight


@dataclass(kw_only=True)
class AnswersReport:
    """What became of the rows that were asked; counted from the journal, so over all runs."""

    rows: int = 0  # answered
    tokens: int = 0  # generated
    finished: Counter[str] = field(default_factory=Counter)  # answers by finish reason
    retokenised: int = 0  # answers
    ended: Counter[str] = field(default_factory=Counter)  # rows with turns left, by reason
    dropped: dict[str, Counter[str]] = field(default_factory=dict)  # rows of a source, by reason

    def drop(self, source: str, reason: str) -> None:
        self.dropped.setdefault(source, Counter())[reason] += 1

    def count(self, kept: dict[str, Any]) -> None:
        """One line of the journal."""
        if "dropped" in kept:
            self.drop(kept["source"], kept["dropped"])
            return
        self.rows += 1
        self.ended.update([kept["ended"]] if kept["ended"] else [])
        for answer in kept["row"]["answers"]:
            self.tokens += answer["tokens"]
            self.finished[answer["finish_reason"]] += 1
            self.retokenised += answer["retokenised"]

    def told(self) -> dict[str, Any]:
        """As a file's footer and the report keep it; what was dropped stands with its source."""
        return {name: value for name, value in vars(self).items() if name != "dropped"}

    def add(self, told: dict[str, Any]) -> None:
        """What another worker counted, as its file tells it."""
        self.rows += told["rows"]
        self.tokens += told["tokens"]
        self.retokenised += told["retokenised"]
        self.finished.update(told["finished"])
        self.ended.update(told["ended"])

    def lines(self) -> list[str]:
        """For readers."""
        answers = sum(self.finished.values())
        said = [f"{answers:,} answers of {self.tokens:,} tokens in {self.rows:,} rows"]
        said += [f"{count:,} answers ended by {why}" for why, count in self.finished.most_common()]
        said += [f"{self.retokenised:,} answers re-tokenised"] if self.retokenised else []
        return said + [f"{count:,} rows shortened: {why}" for why, count in self.ended.items()]


def answer_rows(
    rows: Iterable[Row], asker: Asker, tokenizer: Any, conf: AnswersConf, journal: Path, *,
    report: AnswersReport, total: int | None = None,
) -> Iterator[Row]:  # fmt: skip
    """The rows with the target's answers, in their order; `report` counts what became of them.

    All are asked before the first is given. Raises UserError where some failed for good, unless
    `conf.skip_failed`; the same call then asks for those alone.
    """
    kept = Journal(journal)
    run = _Run(asker=asker, tokenizer=tokenizer, conf=conf, kept=kept, total=total)
    try:
        with asyncio.Runner() as runner:  # its own `run` keeps Ctrl-C until a batch is decoded
            runner.get_loop().run_until_complete(run.ask_all(rows))
        run.say_failures(journal.with_suffix(".failed.jsonl"))
        for failure in run.failed.values():
            report.drop(failure.source, f"failed: {failure.reason}")
        for row_id in run.order:
            if row_id in kept:
                line = kept.read(row_id)
                report.count(line)
                if "row" in line:
                    yield row_of(line["row"])
    finally:
        kept.close()


@dataclass(kw_only=True)
class _Failure:
    source: str
    reason: str
    detail: str


@dataclass(kw_only=True)
class _Run:
    """One process's work on its rows."""

    asker: Asker
    tokenizer: Any
    conf: AnswersConf
    kept: Journal
    total: int | None
    order: list[str] = field(default_factory=list)
    failed: dict[str, _Failure] = field(default_factory=dict)
    in_vain: int = 0  # failures since the last row that was answered
    hopeless: bool = False  # so many of them that the rest was not asked

    async def ask_all(self, rows: Iterable[Row]) -> None:
        """Ask for every row that the journal lacks, so many at a time."""
        room = asyncio.Semaphore(self.conf.rows_at_once)
        try:
            with Progress("answers", total=self.total, kept=len(self.kept)) as progress:
                async with asyncio.TaskGroup() as group:
                    for row in rows:
                        self.order.append(row.id)
                        if row.id in self.kept:
                            continue
                        await room.acquire()
                        if self.hopeless:
                            break
                        asked = group.create_task(self._ask(row, progress))
                        asked.add_done_callback(lambda _: room.release())
        except* UserError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self.asker.close()

    async def _ask(self, row: Row, progress: Progress) -> None:
        dialogue = Dialogue(row=row, asker=self.asker, tokenizer=self.tokenizer, conf=self.conf)
        try:
            answered = await dialogue.answered()
        except MisfitError as reason:
            self.kept.write(row.id, {"source": row.source, "dropped": str(reason)})
        except UnansweredError as error:
            self.failed[row.id] = _Failure(
                source=row.source, reason=str(error), detail=error.detail
            )
            self.in_vain += 1
            self.hopeless |= self.in_vain >= max(HOPELESS, self.conf.rows_at_once)
            progress.count(failed=1)
            return
        else:
            self.kept.write(row.id, {"ended": dialogue.ended, "row": record(answered)})
        self.in_vain = 0
        progress.count(done=1, tokens=sum(answer.tokens for answer in dialogue.answers))

    def say_failures(self, place: Path) -> None:
        """Write down what failed for good. Raises UserError unless it may be left out."""
        if not self.failed:
            place.unlink(missing_ok=True)
            return
        lines = [{"id": row_id, **vars(failure)} for row_id, failure in self.failed.items()]
        place.write_text("".join(json.dumps(line) + "\n" for line in lines))
        reasons = Counter(failure.reason for failure in self.failed.values()).most_common()
        found = (
            f"{len(self.failed):,} that failed for good "
            f"({', '.join(f'{count:,} {reason}' for reason, count in reasons)}), "
            f"{len(self.kept):,} done; listed in {place}"
        )
        if self.hopeless or not self.conf.skip_failed:
            raise UserError(
                f"answers: every row must be answered, got {found}; the same command asks for "
                "these alone, answers.skip_failed=true leaves them out"
            )
        log.warning("answers: left out %s", found)
