"""Build one folder of training data from prompts of many sources, resuming where it stopped."""

import logging
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset

from conf.entry import config_to_yaml
from data.answers.answering import AnswersReport, answer_rows
from data.answers.dialogue import AnswerBackend
from data.answers.endpoint import EndpointAnswerBackend, ServedModel, check_endpoint
from data.chat.prepared_prompts import check_prompt_ids
from data.chat.template import check_template_arguments
from data.mixture.filters import FilterRules, read_first_turns
from data.mixture.gather import SourceReport, check_source, ingest_source
from data.mixture.report import REPORT_FILE, REPORT_PAGE_FILE, collect_results, train_file, write_prepare_report
from data.mixture.select import select_splits
from data.prepare_config import AnswerSource, PrepareConf
from data.sources.files import TABLE_BATCH_ROWS
from data.sources.prepared_rows import HELD_OUT, TRAIN, PreparedRow, row_from_columns, write_prepared_rows
from data.sources.text_hashes import prompt_hashes
from models.checkpoints.fingerprints import tokenizer_fingerprint
from models.io.console import IS_MAIN_PROCESS
from models.io.errors import require
from models.io.files import PARTIAL_SUFFIX, partial_directory, report_disk_errors, write_text_atomically
from models.io.lock import acquire_lock, release_lock
from models.io.tracking import upload_results
from models.parallel.processes import leave_processes
from models.targets.loading import open_target
from models.targets.precision import build_device
from models.targets.pretrained import check_pretrained, load_tokenizer, read_context_length, read_vocab_size

CONFIG_FILE, HELD_OUT_FILE = "config.yaml", f"{HELD_OUT}-00000-of-00001.parquet"
IGNORED_SETTINGS = re.compile(  # settings that do not affect the rows
    r"run_name|output_dir|worker|device\..*|parallel\..*|log\..*"
    r"|answers\.(url|api_key_env|concurrency|retries|timeout_s|skip_failed|batch)"
)
REPORT_TIMEOUT_S = 3600.0  # for another worker that writes the report
log = logging.getLogger("data.prepare")


def prepare_rows(conf: PrepareConf) -> None:
    """Write this worker's file of the folder and, if all files are there, the report."""
    folder = Path(conf.output_dir) / conf.run_name
    check_same_settings(folder, conf)
    if (folder / REPORT_FILE).exists():
        log.info("already prepared: %s", folder / REPORT_PAGE_FILE)
        return
    served = check_endpoint(conf.answers, conf.target) if conf.answers.source is AnswerSource.endpoint else None
    if conf.answers.source is AnswerSource.target:
        check_pretrained(conf.target)
    if conf.parallel.tensor > 1 and not IS_MAIN_PROCESS:
        help_to_answer(conf, folder)
        return
    for name, source in conf.mixture.sources.items():
        check_source(name, source)
    excluded = {file: read_first_turns(file) for file in conf.mixture.exclude}
    rules = build_filter_rules(conf, chain.from_iterable(excluded.values()), served)
    with report_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        acquire_lock(folder, f"lock-{conf.worker:05d}")
        with partial_directory(folder / f"rows-{conf.worker:05d}{PARTIAL_SUFFIX}") as candidates:
            splits, sources = build_splits(conf, rules, candidates)
            record_settings(folder, conf)
            write_files(conf, served, splits, folder)
        report_finished_folder(conf, sources, excluded, folder)
    leave_processes()


def help_to_answer(conf: PrepareConf, folder: Path) -> None:
    """Decode this process's part of the target beside the main process, which has the rows."""
    if train_file(folder, conf.worker, conf.workers).exists():
        return
    from infer.engine.answer_backend import answer_beside_main

    device = build_device(conf.device, conf.target)
    answer_beside_main(open_target(conf.target, device, tensor=conf.parallel.tensor), conf.answers)
    leave_processes()


def report_finished_folder(
    conf: PrepareConf, sources: dict[str, SourceReport], excluded: dict[str, list[str]], folder: Path
) -> None:
    """Write the report if the files of all workers are there, and no other worker has."""
    files = [train_file(folder, worker, conf.workers) for worker in range(conf.workers)]
    files.append(folder / HELD_OUT_FILE)
    if missing := sum(not file.exists() for file in files):
        log.info("%d files of other workers are missing; the last one reports", missing)
        return
    acquire_lock(folder, timeout_s=REPORT_TIMEOUT_S)  # several may be the last
    if (folder / REPORT_FILE).exists():
        return
    write_prepare_report(folder, files, sources, {file: len(texts) for file, texts in excluded.items()})
    log.info("prepared: %s", folder / REPORT_PAGE_FILE)
    upload_results(conf.log, folder, collect_results(folder))


def check_same_settings(folder: Path, conf: PrepareConf) -> None:
    """Raise UserError if the folder was begun with settings that give other rows."""
    if not (folder / CONFIG_FILE).exists():
        return
    recorded, ours = (
        dict(_flatten_keys(yaml.safe_load(text))) for text in ((folder / CONFIG_FILE).read_text(), config_to_yaml(conf))
    )
    for key in recorded | ours:
        require(
            recorded.get(key) == ours.get(key) or bool(IGNORED_SETTINGS.fullmatch(key)),
            f"{key}: must be {recorded.get(key)} as in {folder}, got {ours.get(key)}; choose another run_name",
        )


def record_settings(folder: Path, conf: PrepareConf) -> None:
    """Write the settings if no other worker has, else compare them; raise UserError if they give other rows."""
    acquire_lock(folder, timeout_s=REPORT_TIMEOUT_S)
    check_same_settings(folder, conf)
    if not (folder / CONFIG_FILE).exists():
        write_text_atomically(folder / CONFIG_FILE, config_to_yaml(conf))
    release_lock(folder)


def _flatten_keys(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting under its whole key, as in `mixture.held_out`."""
    if not isinstance(value, dict):
        yield prefix.removesuffix("."), value
        return
    for key, part in value.items():
        yield from _flatten_keys(part, f"{prefix}{key}.")


def build_filter_rules(conf: PrepareConf, excluded: Iterable[str], served: ServedModel | None) -> FilterRules:
    """Return the rules that accept or reject a row; they load the target's tokenizer, but no model."""
    replace_answers = conf.answers.source is not AnswerSource.none
    check_prompt = None
    if conf.has_target:
        for name, source in conf.mixture.sources.items():
            check_template_arguments(load_tokenizer(conf.target), source.template, f"mixture.sources.{name}.template")
        limits = [conf.mixture.max_prompt_tokens, read_context_length(conf.target)]
        if replace_answers:
            conf.answers.prompt_limit(limits[1], served and served.context)  # raises if no room for a prompt is left
            # A server's own limit rejects no rows here, since other workers may have other servers, and all must
            # select the same rows. What is longer than it is counted with the answers.
            contexts = (context for context in (conf.answers.context, limits[1]) if context is not None)
            limits += [context - conf.answers.max_new_tokens for context in contexts]
        check_prompt = partial(
            check_prompt_ids,
            tokenizer=load_tokenizer(conf.target),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            vocab_size=read_vocab_size(conf.target),
        )
    return FilterRules(
        mixture=conf.mixture,
        replace_answers=replace_answers,
        excluded_hashes={value for text in excluded for value in prompt_hashes(text, text)},
        check_prompt=check_prompt,
    )


def build_splits(
    conf: PrepareConf, rules: FilterRules, candidates: Path
) -> tuple[dict[str, Dataset], dict[str, SourceReport]]:
    """Return the rows of each split, in files of `candidates`, and a report per source with its rejected rows."""
    files = {name: candidates / f"{number:03d}.arrow" for number, name in enumerate(conf.mixture.sources)}
    sources = {name: ingest_source(name, source, rules, files[name]) for name, source in conf.mixture.sources.items()}
    splits, dropped = select_splits([*files.values()], conf.mixture)
    for name, report in sources.items():
        report.dropped.update(dropped[name])
    return splits, sources


def write_files(conf: PrepareConf, served: ServedModel | None, splits: dict[str, Dataset], folder: Path) -> None:
    """Write this worker's share of the rows to train on, answered if so configured.

    Worker 0 writes the held-out rows, which nobody answers. Existing files are kept.
    """
    held_out_file = folder / HELD_OUT_FILE
    if conf.worker == 0 and not held_out_file.exists():
        write_prepared_rows(held_out_file, iter_rows(splits[HELD_OUT]), vars(AnswersReport()))
    file = train_file(folder, conf.worker, conf.workers)
    if file.exists():
        return
    train = splits[TRAIN]
    begin, end = (len(train) * n // conf.workers for n in (conf.worker, conf.worker + 1))
    part = train.select(range(begin, end) or [])  # `select` refuses an empty range
    rows, report = iter_rows(part), AnswersReport()
    journal = folder / f"answers-{conf.worker:05d}-of-{conf.workers:05d}.jsonl"
    # The other processes of a split target wait for this one, also without rows.
    if conf.answers.source is not AnswerSource.none and (len(part) or conf.parallel.tensor > 1):
        backend, tokenizer = build_answer_backend(conf, served)
        report.target, report.tokenizer = conf.target.location, tokenizer_fingerprint(tokenizer)
        rows = answer_rows(rows, backend, tokenizer, conf.answers, journal, report=report, total=len(part))
    write_prepared_rows(file, rows, vars(report))
    journal.unlink(missing_ok=True)
    log.info("%s: %s", file, "; ".join(report.summary_lines()) or f"{len(part):,} rows")


def iter_rows(table: Dataset) -> Iterator[PreparedRow]:
    """Yield the rows of a table, with one batch in memory at a time."""
    arrow: Any = table.with_format("arrow")
    for batch in arrow.iter(batch_size=TABLE_BATCH_ROWS):
        yield from map(row_from_columns, batch.to_pylist())


def build_answer_backend(conf: PrepareConf, served: ServedModel | None) -> tuple[AnswerBackend, Any]:
    """Return the backend that answers prompts, and the target's tokenizer."""
    if served is not None:
        tokenizer = load_tokenizer(conf.target)
        return EndpointAnswerBackend(conf.answers, served, conf.target, tokenizer), tokenizer
    # Commands stand above the packages, so this one may import infer; only this branch needs it.
    from infer.engine.answer_backend import TargetAnswerBackend

    target = open_target(conf.target, build_device(conf.device, conf.target), tensor=conf.parallel.tensor)
    return TargetAnswerBackend(target, conf.answers), target.tokenizer
