"""Evaluate the drafts of checkpoints, and write and print the report."""

from pathlib import Path

from infer.config import EvalConf
from infer.inputs.checkpoint_paths import find_tracked_run, resolve_target
from infer.inputs.command_inputs import load_evaluation
from infer.measure.evaluate import evaluate_drafts
from infer.report.report_files import collect_results, write_report_files
from infer.report.tables import print_report
from infer.tuning.report_tuning import tune_drafts_for_report
from models.io.console import IS_MAIN_PROCESS, print_line
from models.io.files import report_disk_errors
from models.io.tracking import upload_results
from models.parallel.processes import leave_processes


def evaluate_checkpoints(conf: EvalConf, directories: list[Path], run: Path) -> None:
    """Evaluate the drafts in `directories` side by side; write the report to the folder `run` and the tracker."""
    target, drafts, evaluation = load_evaluation(conf, directories)
    if conf.tune:
        target_conf = resolve_target(conf.target, directories)
        drafts = tune_drafts_for_report(
            target, drafts, tree=conf.tree, conf=evaluation, target_conf=target_conf, run=run
        )
    report = evaluate_drafts(target, drafts, tree=conf.tree, conf=evaluation)
    leave_processes()
    if not IS_MAIN_PROCESS:
        return
    with report_disk_errors(run):
        write_report_files(report, run)
    print_report(report)
    print_line(f"report: {run / 'report.html'}")
    results = collect_results(report, run, prefix="eval_report")
    upload_results(conf.log, run, results, find_tracked_run(directories))
