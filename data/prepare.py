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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset

from conf.entry import config_to_yaml, entry_point
from data.answers.answering import AnswersReport, answer_rows
from data.answers.config import AnswersConf, AnswerSource
from data.answers.dialogue import AnswerBackend
from data.answers.endpoint import EndpointAnswerBackend, ServedModel, check_endpoint
from data.eval_prompts.contamination import prompt_hashes
from data.mixture.config import MixtureConf
from data.mixture.filters import FilterRules, check_prompt_length, read_first_turns
from data.mixture.gather import check_source, ingest_source
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
    list_part_files,
    part_file_path,
    write_prepare_report,
)
from data.mixture.select import select_splits
from data.sources.files import TABLE_BATCH_ROWS
from data.sources.prepared_rows import PreparedRow, row_from_columns, write_prepared_rows
from data.vocabulary.counts import write_token_counts
from models.console import setup_logging
from models.device import DeviceConf
from models.errors import UserError, require
from models.files import report_disk_errors, write_text_atomically
from models.target.precision import build_device
from models.target.target import TargetConf

log = logging.getLogger("data.prepare")


@dataclass(kw_only=True)
class PrepareConf:
    """Settings of `data.prepare`."""

    mixture: MixtureConf
    # A target without a name or path becomes None: prompts are then measured in characters only.
    target: TargetConf | None = field(default_factory=lambda: TargetConf(name=""))
    answers: AnswersConf = field(default_factory=AnswersConf)
    device: DeviceConf = field(default_factory=DeviceConf)  # answers.source=target
    worker: int = 0  # this worker's number, in 0..workers - 1
    workers: int = 1  # each takes a share of the rows and writes its own files
    run_name: str = "demo"
    output_dir: str = "outputs/prepare"

    def __post_init__(self) -> None:
        if self.target is not None and not self.target.name:
            path = self.target.path
            self.target = replace(self.target, name=path) if path is not None else None
        require(
            0 <= self.worker < self.workers,
            f"worker: must lie in 0..{self.workers - 1} of workers={self.workers}, "
            f"got {self.worker}",
        )
        require(
            self.target is not None or self.mixture.max_prompt_tokens is None,
            "mixture.max_prompt_tokens: must be null without a target, got "
            f"{self.mixture.max_prompt_tokens}; choose one by target=NAME",
        )
        require(
            self.target is not None or self.answers.source is AnswerSource.none,
            f"target: must be chosen for answers={self.answers.source.value}, got none; "
            "add target=NAME, or answers=none to keep the data's own answers",
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
    served = (
        check_endpoint(conf.answers, conf.target)
        if conf.target is not None and conf.answers.source is AnswerSource.endpoint
        else None
    )
    for name, source in conf.mixture.sources.items():
        check_source(name, source)
    excluded = {file: read_first_turns(file) for file in conf.mixture.exclude}
    rules = build_filter_rules(conf, chain.from_iterable(excluded.values()), served)
    with report_disk_errors(folder):
        claim_folder(folder, provenance, worker_dir)
        write_text_atomically(folder / "config.yaml", config_to_yaml(conf), partial_dir=worker_dir)
        splits, sources = build_splits(conf, rules, folder, worker_dir)
        for split, rows in splits.items():
            write_split_part(conf, served, split, rows, folder, worker_dir)
        if missing := sum(not file.exists() for file in list_part_files(folder, conf.workers)):
            log.info(
                "%d files of other workers are missing; the last worker writes the report", missing
            )
        else:
            finish_folder(conf, sources, excluded, folder, worker_dir)
        release_worker_dir(worker_dir)


def build_filter_rules(
    conf: PrepareConf, excluded: Iterable[str], served: ServedModel | None
) -> FilterRules:
    """Return the rules that accept or reject a row.

    The target's tokenizer measures the prompts; no model is loaded.
    """
    replace_answers = conf.answers.source is not AnswerSource.none
    check_length = None
    if conf.target is not None:
        limits = [conf.mixture.max_prompt_tokens, conf.target.context_length()]
        if replace_answers:
            limits.append(conf.answers.prompt_limit(limits[1], served and served.context))
        if max_tokens := [limit for limit in limits if limit is not None]:
            check_length = partial(
                check_prompt_length, tokenizer=conf.target.load_tokenizer(),
                max_tokens=min(max_tokens),
            )  # fmt: skip
    return FilterRules(
        mixture=conf.mixture,
        replace_answers=replace_answers,
        excluded_hashes={value for text in excluded for value in prompt_hashes(text, text)},
        check_length=check_length,
    )


def build_splits(
    conf: PrepareConf, rules: FilterRules, folder: Path, worker_dir: Path
) -> tuple[dict[str, Dataset], dict[str, SourceReport]]:
    """Return the rows of each split, and a report per source with its rejected rows.

    On a UserError a folder without answers is removed, so that its name stays free.
    """
    try:
        stats = {
            name: ingest_source(name, source, rules, worker_dir / f"source-{number:03d}.arrow")
            for number, (name, source) in enumerate(conf.mixture.sources.items())
        }
        splits, dropped = select_splits(sorted(worker_dir.glob("source-*.arrow")), conf.mixture)
    except UserError:
        discard_empty_folder(folder, worker_dir)
        raise
    return splits, {
        name: SourceReport(
            path=source.path, read=stats[name].read, share_asked=source.share,
            dropped=stats[name].dropped + dropped[name], examples=stats[name].examples,
        )
        for name, source in conf.mixture.sources.items()
    }  # fmt: skip


def write_split_part(
    conf: PrepareConf,
    served: ServedModel | None,
    split: str,
    table: Dataset,
    folder: Path,
    worker_dir: Path,
) -> None:
    """Write this worker's part of a split, with answers if it trains; keep an existing file.

    The footer of the file has the row counts by source and license.
    """
    file = part_file_path(folder, split, conf.worker, conf.workers)
    if file.exists():
        return
    is_empty = len(table) <= conf.worker  # `shard` cannot make an empty part
    part = table.select([]) if is_empty else table.shard(num_shards=conf.workers, index=conf.worker)
    arrow_part: Any = part.with_format("arrow")  # with one batch in memory at a time
    rows = (
        row_from_columns(columns)
        for batch in arrow_part.iter(batch_size=TABLE_BATCH_ROWS)
        for columns in batch.to_pylist()
    )
    report = AnswersReport()
    needs_answers = split == TRAIN and conf.answers.source is not AnswerSource.none
    if needs_answers and conf.target is not None and len(part):
        backend, tokenizer = build_answer_backend(conf, conf.target, served)
        rows = answer_rows(
            rows, backend, tokenizer, conf.answers, worker_dir / "answers.jsonl",
            report=report, total=len(part),
        )  # fmt: skip
    license_counts: dict[str, Counter[str]] = defaultdict(Counter)

    def count_licenses() -> Iterator[PreparedRow]:
        for row in rows:
            license_counts[row.source][row.license] += 1
            yield row

    def build_footer() -> dict[str, Any]:
        return {"licenses": license_counts, "dropped": report.dropped, **report.to_dict()}

    write_prepared_rows(file, count_licenses(), build_footer)
    summary = "; ".join(report.summary_lines()) if report.rows else f"{len(part):,} rows"
    log.info("%s: %s", file, summary)


def finish_folder(
    conf: PrepareConf, sources: dict[str, SourceReport], excluded: dict[str, list[str]],
    folder: Path,
    worker_dir: Path,
) -> None:  # fmt: skip
    """Count the tokens of all workers' files and write the report."""
    coverage = (
        write_token_counts(folder, conf.target.load_tokenizer(), worker_dir)
        if conf.target is not None
        else ""
    )
    write_prepare_report(
        folder, conf.workers, sources, {file: len(texts) for file, texts in excluded.items()},
        worker_dir, coverage,
    )  # fmt: skip
    log.info("prepared: %s", folder / REPORT_PAGE_FILE)


def build_answer_backend(
    conf: PrepareConf, target: TargetConf, served: ServedModel | None
) -> tuple[AnswerBackend, Any]:
    """Return the backend that answers prompts, and the target's tokenizer."""
    if served is not None:
        tokenizer = target.load_tokenizer()
        return EndpointAnswerBackend(conf.answers, served, target, tokenizer), tokenizer
    # Commands stand above the packages, so this one may import infer; only this branch needs it.
    from infer.engine.answer_backend import TargetAnswerBackend

    built_target = target.build(build_device(conf.device, target))
    return TargetAnswerBackend(built_target, conf.answers), built_target.tokenizer


if __name__ == "__main__":
    main()
