"""Evaluate drafts on held-out prompts, one or several side by side.

python -m infer.eval                        the newest finished training run
python -m infer.eval checkpoint=DIR tree=chain
python -m infer.eval checkpoint=[DIR,DIR]
python -m infer.eval tree=auto              also the tree that this device wants
"""

from pathlib import Path

from conf.entry import entry_point
from infer.checkpoint_paths import open_checkpoints, resolve_target
from infer.command_inputs import check_inputs, load_evaluation
from infer.config import EvalConf
from infer.measure.evaluate import evaluate_drafts
from infer.report.report_files import write_report_files
from infer.report.tables import print_report
from infer.tuning.auto import tune_drafts_for_report
from models.console import print_line, setup_logging
from models.files import report_disk_errors
from models.lock import claim_run_folder


@entry_point("eval", EvalConf)
def main(conf: EvalConf) -> None:
    setup_logging()
    directories = open_checkpoints(conf.checkpoint, print_line)
    run = Path(conf.output_dir) / conf.run_name
    check_inputs(conf.tree, conf.evaluation.prompts)
    claim_run_folder(run)
    target, drafts, evaluation = load_evaluation(conf, directories)
    drafts = tune_drafts_for_report(
        target, drafts, tree=conf.tree, conf=evaluation,
        target_conf=resolve_target(conf.target, directories), print_line=print_line,
    )  # fmt: skip
    report = evaluate_drafts(target, drafts, tree=conf.tree, conf=evaluation, print_line=print_line)
    with report_disk_errors(run):
        write_report_files(report, run)
    print_report(report)
    print_line(f"report: {run / 'report.html'}")


if __name__ == "__main__":
    main()
