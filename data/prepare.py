"""`python -m data.prepare`: build one folder of training data from prompts of many sources.

    sources -> filter the rows and count rejections -> select by share -> split by hash
            -> generate answers with the target -> files

python -m data.prepare                       the demo's prompts, answered by the demo's target
python -m data.prepare mixture=one mixture.sources.rows.path=FILE run_name=mine
python -m data.prepare mixture=chat workers=4 worker=0
python -m data.prepare mixture=chat target=qwen3-8b answers=endpoint answers.url=http://host:8000/v1

The same command resumes a run that was killed and keeps its finished answers.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from conf.entry import config_to_yaml, entry_point
from data.answers.answering import AnswersReport, answer_rows
from data.answers.config import AnswersConf, AnswerSource
from data.answers.dialogue import AnswerBackend
from data.answers.endpoint import EndpointAnswerBackend, ServedModel
from data.answers.endpoint import check_endpoint as check_endpoint
from data.eval_prompts.contamination import prompt_hashes
from data.mixture.config import MixtureConf
from data.mixture.filters import FilterRules
from data.mixture.gather import check_source, ingest_source
from data.mixture.limits import build_length_check, read_first_turns
from data.mixture.provenance import (
    check_provenance,
    claim_folder,
    collect_provenance,
    discard_empty_folder,
    release_worker_dir,
)
from data.mixture.report import (
    REPORT_FILE,
    REPORT_PAGE_FILE,
    TRAIN,
    SourceReport,
    add_file_counts,
    build_source_reports,
    list_part_files,
    part_file_path,
    write_prepare_report,
)
from data.mixture.select import iter_table_rows, select_splits
from data.sources.prepared_rows import PreparedRow, write_prepared_rows
from data.vocabulary.counts import write_token_counts
from models.console import setup_logging
from models.device import DeviceConf
from models.errors import UserError
from models.files import report_disk_errors
from models.target.target import TargetConf

log = logging.getLogger("data.prepare")


@dataclass(kw_only=True)
class PrepareConf:
    """Settings of `data.prepare`."""

    mixture: MixtureConf
    # A target without a name or path becomes None: prompts are then measured in characters only.
    target: TargetConf | None = field(default_factory=lambda: TargetConf(name=""))
    answers: AnswersConf = field(default_factory=AnswersConf)
    device: DeviceConf = field(default_factory=DeviceConf)  # answers.by=target
    worker: int = 0  # this worker's number, in 0..workers - 1
    workers: int = 1  # each takes a share of the rows and writes its own files
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
        if self.target is None and self.answers.by is not AnswerSource.none:
            raise UserError(
                f"target: must be chosen for answers={self.answers.by.value}, got none; "
                "add target=NAME, or answers=none to keep the data's own answers"
            )


@entry_point("prepare", PrepareConf)
def main(conf: PrepareConf) -> None:
    setup_logging()
    folder = Path(conf.output_dir) / conf.run_name
    worker_dir = folder / "work" / f"worker-{conf.worker:05d}"  # only this process writes here
    provenance = collect_provenance(conf, conf.mixture)
    check_provenance(folder, provenance)
    if (folder / REPORT_FILE).exists():
        release_worker_dir(worker_dir)  # left by a run that was killed just before its end
        log.info("already prepared: %s", folder / REPORT_PAGE_FILE)
        return
    served = None
    if conf.target is not None and conf.answers.by is AnswerSource.endpoint:
        served = check_endpoint(conf.answers, conf.target)
    for name, source in conf.mixture.sources.items():
        check_source(name, source)
    excluded = {file: read_first_turns(file) for file in conf.mixture.exclude}
    rules = build_filter_rules(
        conf, [text for texts in excluded.values() for text in texts], served
    )
    with report_disk_errors(folder):
        claim_folder(folder, provenance, worker_dir)
        (worker_dir / "config.yaml").write_text(config_to_yaml(conf))
        (worker_dir / "config.yaml").replace(folder / "config.yaml")
        splits, sources = build_splits(conf, rules, folder, worker_dir)
        for split, rows in splits.items():
            write_split_part(conf, served, split, rows, folder, worker_dir)
        if missing := sum(not file.exists() for file in list_part_files(folder, conf.workers)):
            log.info(
                "%d files of other workers are missing; the last worker writes the report", missing
            )
        else:
            counts = {file: len(texts) for file, texts in excluded.items()}
            finish_folder(conf, sources, counts, folder, worker_dir)
        release_worker_dir(worker_dir)


def build_filter_rules(
    conf: PrepareConf, excluded: list[str], served: ServedModel | None
) -> FilterRules:
    """Build the rules that accept or reject a row.

    The target's tokenizer measures the prompts; no model is loaded.
    """
    mixture = conf.mixture
    replace_answers = conf.answers.by is not AnswerSource.none
    check_length = None
    if conf.target is not None:
        limits = [mixture.max_prompt_tokens, conf.target.source.context_length()]
        if replace_answers:
            limits.append(conf.answers.prompt_limit(limits[1], served and served.context))
        max_tokens = [limit for limit in limits if limit is not None]
        check_length = (
            build_length_check(conf.target.source.load_tokenizer(), min(max_tokens))
            if max_tokens
            else None
        )
    return FilterRules(
        replace_answers=replace_answers,
        excluded_hashes={sign for text in excluded for sign in prompt_hashes(text, text)},
        held_out_share=mixture.held_out,
        min_chars=mixture.min_chars,
        max_chars=mixture.max_chars,
        check_length=check_length,
    )


def build_splits(
    conf: PrepareConf, rules: FilterRules, folder: Path, worker_dir: Path
) -> tuple[dict[str, Dataset], dict[str, SourceReport]]:
    """Return the rows of each split, and a report per source with its rejected rows.

    On a UserError a folder without answers is removed, so that its name stays free.
    """
    stats = {}
    try:
        for number, (name, source) in enumerate(conf.mixture.sources.items()):
            stats[name] = ingest_source(
                name, source, rules, worker_dir / f"source-{number:03d}.arrow"
            )
            log.info("%s: %s", name, stats[name])
            stats[name].check_not_empty(name)
        splits, dropped = select_splits(sorted(worker_dir.glob("source-*.arrow")), conf.mixture)
    except UserError:
        discard_empty_folder(folder, worker_dir)
        raise
    return splits, build_source_reports(conf.mixture, stats, dropped)


def write_split_part(
    conf: PrepareConf,
    served: ServedModel | None,
    split: str,
    rows: Dataset,
    folder: Path,
    worker_dir: Path,
) -> None:
    """Write this worker's part of a split, with answers if it trains; keep an existing file."""
    file = part_file_path(folder, split, conf.worker, conf.workers)
    if file.exists():
        return
    is_empty = len(rows) <= conf.worker  # `shard` cannot make an empty part
    part = rows.select([]) if is_empty else rows.shard(num_shards=conf.workers, index=conf.worker)
    needs_answers = split == TRAIN and conf.answers.by is not AnswerSource.none and len(part)
    backend = build_answer_backend(conf, served) if needs_answers else None
    log.info(
        "%s: %s",
        file,
        write_split_rows(file, part, backend, conf.answers, worker_dir / "answers.jsonl"),
    )


def finish_folder(
    conf: PrepareConf, sources: dict[str, SourceReport], excluded: dict[str, int], folder: Path,
    worker_dir: Path,
) -> None:  # fmt: skip
    """Count the tokens of all workers' files and write the report."""
    coverage = ""
    if conf.target is not None:
        coverage = write_token_counts(folder, conf.target.source.load_tokenizer(), worker_dir)
    add_file_counts(sources, list_part_files(folder, conf.workers))
    write_prepare_report(folder, sources, excluded, worker_dir, coverage)
    log.info("prepared: %s", folder / REPORT_PAGE_FILE)


def build_answer_backend(
    conf: PrepareConf, served: ServedModel | None
) -> tuple[AnswerBackend, Any]:
    """Build the backend that answers prompts, and return it with the target's tokenizer."""
    assert conf.target is not None
    if served is not None:
        tokenizer = conf.target.source.load_tokenizer()
        return EndpointAnswerBackend(conf.answers, served, conf.target, tokenizer), tokenizer
    # Commands stand above the packages, so this one may import infer; only this branch needs it.
    from infer.engine.answer_backend import TargetAnswerBackend

    target = conf.target.build(conf.device.build())
    return TargetAnswerBackend(target, conf.answers), target.tokenizer


def write_split_rows(
    file: Path,
    table: Dataset,
    backend: tuple[AnswerBackend, Any] | None,
    conf: AnswersConf,
    journal: Path,
) -> str:
    """Write one file of the folder, with its row counts by source and license in the footer.

    Return a summary for the log.
    """
    license_counts: dict[str, Counter[str]] = defaultdict(Counter)
    report = AnswersReport()
    rows = iter_table_rows(table)
    if backend is not None:
        rows = answer_rows(rows, *backend, conf, journal, report=report, total=len(table))

    def count_licenses() -> Iterator[PreparedRow]:
        for row in rows:
            license_counts[row.source][row.licence] += 1
            yield row

    def build_footer() -> dict[str, Any]:
        return {"licences": license_counts, "dropped": report.dropped, **report.to_dict()}

    write_prepared_rows(file, count_licenses(), build_footer)
    return "; ".join(report.summary_lines()) if report.rows else f"{len(table):,} rows"


if __name__ == "__main__":
    main()
