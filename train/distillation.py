"""Distill a draft from its target, measure what it gains, and write and print the report."""

import logging
from pathlib import Path

from conf.typed_text import format_overrides
from data.eval_prompts.held_out_files import write_held_out
from infer.inputs.command_inputs import load_draft_under_test
from infer.measure.eval_modes import warn_tree_depth
from infer.measure.evaluate import evaluate_drafts
from infer.report.report_files import collect_results, write_report_files
from infer.report.tables import print_report
from infer.results.schema import EvalReport
from infer.tuning.report_tuning import tune_drafts_for_report
from models.checkpoints.fingerprints import frozen_fingerprint
from models.device.memory_watch import MemoryWatch
from models.drafts.registry import build_draft
from models.targets.target import Target
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.first_lines import announce_recipe
from train.planning.device_fit import FittedRun
from train.quick_eval import build_quick_eval, build_stored_eval
from train.rows.held_out import resolve_evaluation
from train.rows.packed_rows import load_training_rows
from train.rows.row_facts import choose_vocabulary, write_prompt_hashes
from train.rows.stored_target import build_run_target
from train.run.folder import check_disk_space, open_run, replace_outdated_files, report_full_disk
from train.run.log import MetricLogger
from train.run.model_card import write_model_card
from train.run.state import RunState
from train.trainer import Trainer

log = logging.getLogger("train")


def distill_draft(fitted: FittedRun) -> None:
    """Train the draft of a checked run, measure it and publish its report."""
    conf, parallel = fitted.conf, fitted.parallel
    memory_watch = MemoryWatch(parallel.device)
    run = open_run(conf, parallel)
    target = build_run_target(conf, parallel)
    with report_full_disk(run.folder):
        first_checkpoint = None
        if run.progress.step == 0 and (first_stage := conf.first_stage()) is not None:
            first_checkpoint = train_first_stage(first_stage, parallel, target)
        if (limits := conf.draft.describe_engine_limits()) is not None:
            log.warning(limits)
        metric_logger = train_draft(conf, parallel, run, target, first_checkpoint)
        parallel.free_training_memory()
        report_memory(fitted.planned_bytes, memory_watch)
        if not conf.measure:
            log.info(
                "measure=false: nothing was decoded, so tokens per round, speed and whether answers stay the target's "
                "are unknown; where the target fits, measure them by\n    python -m infer.eval %s",
                format_overrides({"checkpoint": run.folder / "checkpoint"}),
            )
        elif parallel.decodes:
            report = measure_draft(conf, target, run.folder)
            if parallel.is_main:
                publish_report(conf, report, run.folder, metric_logger, target_vocab=target.vocab_size)
    parallel.end()


def measure_draft(conf: TrainConf, target: Target, folder: Path) -> EvalReport:
    """Decode the run's held-out prompts with the best draft, and with a tuned tree if asked for."""
    evaluation = resolve_evaluation(conf, folder)
    drafts = [load_draft_under_test(folder / "checkpoint", target)]
    if conf.tune:
        drafts = tune_drafts_for_report(
            target, drafts, tree=conf.tree, conf=evaluation, target_conf=conf.target, run=folder
        )
    return evaluate_drafts(target, drafts, tree=conf.tree, conf=evaluation)


def train_first_stage(conf: TrainConf, parallel: Parallel, target: Target) -> Path:
    """Train the draft that the main stage starts from; return its checkpoint folder."""
    run = open_run(conf, parallel)
    log.info("first stage: %s, in %s", conf.draft.method, run.folder)
    train_draft(conf, parallel, run, target)
    parallel.free_training_memory()
    parallel.barrier()
    return run.folder / "checkpoint"


def train_draft(
    conf: TrainConf, parallel: Parallel, run: RunState, target: Target, first_checkpoint: Path | None = None
) -> MetricLogger:
    """Train a new draft to the last step of its run, and return the logger of its metrics.

    It starts from the checkpoint of its first stage, if there is one. The draft is not returned, so that its memory
    and that of its training are free afterwards.
    """
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed, on_host=parallel.builds_draft_on_host)
    if first_checkpoint is not None:
        draft.start_from_first_stage(first_checkpoint, target)
    if layers := draft.needs.layers:
        log.info("draft: captures what enters layers %s of %d", layers, target.num_layers)
    run.record_models(target.fingerprint, frozen_fingerprint(draft) if conf.draft.pretrained else None)
    if run.progress.step and run.progress.step == run.progress.steps:
        log.info("%s is trained already", run.folder)
        if parallel.is_main:
            replace_outdated_files(run, conf)
        return MetricLogger(conf.log, run, parallel.accelerator)
    check_disk_space(run.folder, draft, target)
    run.drop_incomparable_best()
    metric_logger = MetricLogger(conf.log, run, parallel.accelerator)
    data = load_training_rows(conf, target, draft, parallel)
    announce_recipe(conf, len(data.rows))
    run.record_rows(data.rows.content_hash())
    if parallel.is_main:
        replace_outdated_files(run, conf)
        write_held_out(data.held_out, run.folder)
        write_prompt_hashes(data.rows, target.tokenizer, run.folder)
    choose_vocabulary(draft, target, data.rows, run.folder if parallel.is_main else None)
    if conf.measure or data.store is None:
        tree, prompts = conf.tree.build(), [row["ids"] for row in data.held_out.selection]
        warn_tree_depth(tree, draft, "the draft")
        evaluate = build_quick_eval(target, prompts, tree, conf.evaluation, batch=conf.held_out.batch)
    else:
        evaluate = build_stored_eval(target, data.selection, data.store)
    Trainer(
        conf=conf,
        parallel=parallel,
        target=target,
        draft=draft,
        rows=data.rows,
        store=data.store,
        run_state=run,
        metric_logger=metric_logger,
        evaluate=evaluate,
    ).run()
    return metric_logger


def report_memory(planned_bytes: int | None, watch: MemoryWatch) -> None:
    """Log the planned bytes of a process's tensors, and the peak that its device tells."""
    sizes = {"of tensors planned": planned_bytes, watch.quantity: watch.peak_bytes()}
    texts = [f"{size / 2**30:.2f} GiB {name}" for name, size in sizes.items() if size is not None]
    if texts:
        log.info("memory of a process in training: %s", ", ".join(texts))


def publish_report(
    conf: TrainConf, report: EvalReport, folder: Path, metric_logger: MetricLogger, *, target_vocab: int
) -> None:
    """Write the report and the model card to the run folder and the trackers, and print it."""
    write_report_files(report, folder)
    write_model_card(conf, report, folder, target_vocab=target_vocab)
    metric_logger.upload_report(collect_results(report, folder, prefix="report"))
    print_report(report)
    log.info("report: %s\ncheckpoint: %s", folder / "report.html", folder / "checkpoint")
