"""Build one folder of training data from prompts of many sources, resuming where it stopped."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset

from conf.entry import config_to_yaml
from data.answers.answering import AnswersReport, answer_rows
from data.answers.config import AnswerSource
from data.answers.dialogue import AnswerBackend
from data.answers.endpoint import EndpointAnswerBackend, ServedModel, check_endpoint
from data.eval_prompts.contamination import prompt_hashes
from data.mixture.config import PrepareConf
from data.mixture.filters import FilterRules, check_prompt_ids, read_first_turns
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
from data.mixture.tracked import collect_results
from data.sources.files import TABLE_BATCH_ROWS
from data.sources.prepared_rows import PreparedRow, row_from_columns, write_prepared_rows
from data.vocabulary.counts import write_token_counts
from models.errors import UserError
from models.files import report_disk_errors, write_text_atomically
from models.target.config import TargetConf
from models.target.precision import build_device
from models.target.pretrained import (
    check_pretrained,
    load_target,
    load_tokenizer,
    read_context_length,
    read_vocab_size,
)
from models.tracking import upload_results

log = logging.getLogger("data.prepare")


def prepare_rows(conf: PrepareConf) -> None:
    """Write this worker's files of the folder and, if it is the last one, the report."""
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
    if conf.answers.source is AnswerSource.target:
        check_pretrained(conf.target)
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
    if not missing:
        upload_results(conf.log, folder, collect_results(folder))


def build_filter_rules(
    conf: PrepareConf, excluded: Iterable[str], served: ServedModel | None
) -> FilterRules:
    """Return the rules that accept or reject a row.

    The target's tokenizer measures the prompts; no model is loaded.
    """
    replace_answers = conf.answers.source is not AnswerSource.none
    check_prompt = None
    if conf.target is not None:
        limits = [conf.mixture.max_prompt_tokens, read_context_length(conf.target)]
        if replace_answers:
            limits.append(conf.answers.prompt_limit(limits[1], served and served.context))
        check_prompt = partial(
            check_prompt_ids, tokenizer=load_tokenizer(conf.target),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            vocab_size=read_vocab_size(conf.target),
        )  # fmt: skip
    return FilterRules(
        mixture=conf.mixture,
        replace_answers=replace_answers,
        excluded_hashes={value for text in excluded for value in prompt_hashes(text, text)},
        check_prompt=check_prompt,
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
        write_token_counts(folder, load_tokenizer(conf.target), worker_dir)
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
        tokenizer = load_tokenizer(target)
        return EndpointAnswerBackend(conf.answers, served, target, tokenizer), tokenizer
    # Commands stand above the packages, so this one may import infer; only this branch needs it.
    from infer.engine.answer_backend import TargetAnswerBackend

    built_target = load_target(target, build_device(conf.device, target))
    return TargetAnswerBackend(built_target, conf.answers), built_target.tokenizer
