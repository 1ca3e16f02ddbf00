"""`python -m data.prepare`: prompts of many sources, answered by the target, as one folder.

    sources -> gathered: each row kept or counted -> chosen by share -> split by hash
            -> answered by the target -> files

python -m data.prepare                       the demo's prompts, answered by the demo's target
python -m data.prepare mixture=one mixture.sources.rows.path=FILE run_name=mine
python -m data.prepare mixture=chat workers=4 worker=0
python -m data.prepare mixture=chat target=qwen3-8b answers=endpoint answers.url=http://host:8000/v1

Killed, the same command goes on: what is finished is kept.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from conf.entry import config_yaml, entry_point
from data.answers.answering import AnswersReport, answer_rows
from data.answers.config import AnswersConf, By
from data.answers.dialogue import Asker
from data.answers.endpoint import Endpoint, Served
from data.answers.endpoint import check as check_endpoint
from data.eval_prompts.contamination import signs
from data.mixture.config import MixtureConf
from data.mixture.filters import Rules
from data.mixture.gather import check_source, gather
from data.mixture.limits import first_turns, fitting
from data.mixture.provenance import check_claim, claim, forget, made_from, release
from data.mixture.report import (
    PAGE,
    REPORT,
    TRAIN,
    SourceReport,
    files_of,
    path_of,
    source_reports,
    sum_up,
    write_report,
)
from data.mixture.select import chosen_rows, rows_of
from data.sources.prepared_rows import Row, write
from data.vocabulary.prepared_counts import keep_counts
from models.checkpoint import writing
from models.console import speak
from models.device import DeviceConf
from models.errors import UserError
from models.target.target import TargetConf

log = logging.getLogger("data.prepare")


@dataclass(kw_only=True)
class PrepareConf:
    """Configures `data.prepare`."""

    mixture: MixtureConf
    # None, as here, where it has no name: prompts are measured in characters alone
    target: TargetConf | None = field(default_factory=lambda: TargetConf(name=""))
    answers: AnswersConf = field(default_factory=AnswersConf)
    device: DeviceConf = field(default_factory=DeviceConf)  # answers.by=target
    worker: int = 0  # of so many, each with its share of the rows and its own files
    workers: int = 1
    run_name: str = "demo"
    output_dir: str = "outputs/prepare"

    def __post_init__(self) -> None:
        if self.target is not None and not self.target.name:
            path = self.target.path
            self.target = replace(self.target, name=path) if path is not None else None
        if not 0 <= self.worker < self.workers:
            raise UserError(
                f"worker: must lie in 0..{self.workers - 1} of workers={self.workers}, "
                f"got {self.worker}"
            )
        if self.target is None and self.mixture.max_prompt_tokens is not None:
            raise UserError(
                "mixture.max_prompt_tokens: must be null without a target, got "
                f"{self.mixture.max_prompt_tokens}; choose one by target=NAME"
            )
        if self.target is None and self.answers.by is not By.none:
            raise UserError(
                f"target: must be chosen for answers={self.answers.by.value}, got none; "
                "add target=NAME, or answers=none for those of the data"
            )


@entry_point("prepare", PrepareConf)
def main(conf: PrepareConf) -> None:
    speak()
    folder = Path(conf.output_dir) / conf.run_name
    own = folder / "work" / f"worker-{conf.worker:05d}"  # nobody else writes here
    made = made_from(conf, conf.mixture)
    check_claim(folder, made)
    if (folder / REPORT).exists():
        release(own)  # of a run that was killed as it ended
        log.info("prepared already: %s", folder / PAGE)
        return
    served = None
    if conf.target is not None and conf.answers.by is By.endpoint:
        served = check_endpoint(conf.answers, conf.target)
    for name, source in conf.mixture.sources.items():
        check_source(name, source)
    unseen = {file: first_turns(file) for file in conf.mixture.exclude}
    rules = rules_of(conf, [text for texts in unseen.values() for text in texts], served)
    with writing(folder):
        claim(folder, made, own)
        (own / "config.yaml").write_text(config_yaml(conf))
        (own / "config.yaml").replace(folder / "config.yaml")
        splits, sources = chosen(conf, rules, folder, own)
        for split, rows in splits.items():
            write_part(conf, served, split, rows, folder, own)
        if missing := sum(not file.exists() for file in files_of(folder, conf.workers)):
            log.info("the last worker writes the report; %d files are not there yet", missing)
        else:
            counts = {file: len(texts) for file, texts in unseen.items()}
            finish(conf, sources, counts, folder, own)
        release(own)


def rules_of(conf: PrepareConf, unseen: list[str], served: Served | None) -> Rules:
    """What a row must be. The target's tokenizer measures prompts; no model is loaded."""
    wanted = conf.mixture
    answered = conf.answers.by is not By.none
    fits = None
    if conf.target is not None:
        limits = [wanted.max_prompt_tokens, conf.target.source.context()]
        if answered:
            limits.append(conf.answers.room(limits[1], served and served.context))
        known = [limit for limit in limits if limit is not None]
        fits = fitting(conf.target.source.tokenizer(), min(known)) if known else None
    return Rules(
        answered=answered, excluded={sign for text in unseen for sign in signs(text, text)},
        held_out=wanted.held_out, min_chars=wanted.min_chars, max_chars=wanted.max_chars, fits=fits,
    )  # fmt: skip


def chosen(
    conf: PrepareConf, rules: Rules, folder: Path, own: Path
) -> tuple[dict[str, Dataset], dict[str, SourceReport]]:
    """The rows of each split, and what became of the others. Refused, the folder is as it was."""
    gathered = {}
    try:
        for number, (name, source) in enumerate(conf.mixture.sources.items()):
            gathered[name] = gather(name, source, rules, own / f"source-{number:03d}.arrow")
            log.info("%s: %s", name, gathered[name])
            gathered[name].refuse_nothing(name)
        splits, dropped = chosen_rows(sorted(own.glob("source-*.arrow")), conf.mixture)
    except UserError:
        forget(folder, own)
        raise
    return splits, source_reports(conf.mixture, gathered, dropped)


def write_part(
    conf: PrepareConf, served: Served | None, split: str, rows: Dataset, folder: Path, own: Path
) -> None:
    """This worker's part of a split, answered; one that is there already is kept."""
    file = path_of(folder, split, conf.worker, conf.workers)
    if file.exists():
        return
    few = len(rows) <= conf.worker  # of which `shard` cannot make an empty part
    mine = rows.select([]) if few else rows.shard(num_shards=conf.workers, index=conf.worker)
    answered = split == TRAIN and conf.answers.by is not By.none and len(mine)
    asker = asker_of(conf, served) if answered else None
    log.info("%s: %s", file, write_rows(file, mine, asker, conf.answers, own / "answers.jsonl"))


def finish(
    conf: PrepareConf, sources: dict[str, SourceReport], unseen: dict[str, int], folder: Path,
    own: Path,
) -> None:  # fmt: skip
    """The report over all workers' files."""
    covered = ""
    if conf.target is not None:
        covered = keep_counts(folder, conf.target.source.tokenizer(), own)
    sum_up(sources, files_of(folder, conf.workers))
    write_report(folder, sources, unseen, own, covered)
    log.info("prepared: %s", folder / PAGE)


def asker_of(conf: PrepareConf, served: Served | None) -> tuple[Asker, Any]:
    """The way to the target, and the target's tokenizer."""
    assert conf.target is not None
    if served is not None:
        tokenizer = conf.target.source.tokenizer()
        return Endpoint(conf.answers, served, conf.target, tokenizer), tokenizer
    from infer.engine.answer_backend import TargetAsker  # a command stands above the packages

    target = conf.target.build(conf.device.build())
    return TargetAsker(target, conf.answers), target.tokenizer


def write_rows(
    file: Path, table: Dataset, asker: tuple[Asker, Any] | None, conf: AnswersConf, journal: Path
) -> str:
    """One file of the folder; its footer says how many rows of each source and licence it has."""
    licences: dict[str, Counter[str]] = defaultdict(Counter)
    answers = AnswersReport()
    rows = rows_of(table)
    if asker is not None:
        rows = answer_rows(rows, *asker, conf, journal, report=answers, total=len(table))

    def counted() -> Iterator[Row]:
        for row in rows:
            licences[row.source][row.licence] += 1
            yield row

    def notes() -> dict[str, Any]:
        return {"licences": licences, "dropped": answers.dropped, **answers.told()}

    write(file, counted(), notes)
    return "; ".join(answers.lines()) if answers.rows else f"{len(table):,} rows"


if __name__ == "__main__":
    main()
