"""`python -m train`: distil a draft from its target, and prove what it gains.

Bare, it runs the embedded demo on a laptop. Killed, the same command continues the run.
"""

import logging
from pathlib import Path

from conf.entry import entry_point
from infer.candidates import candidate
from infer.eval import evaluate
from infer.measure.report import Report
from infer.report.tables import sections, summary_table, terminal_table
from infer.report.write import write
from models.console import CONSOLE, speak
from train.config import TrainConf
from train.extension import known_steps
from train.first_lines import announce
from train.log import Log
from train.loop import Loop
from train.quick_eval import measure
from train.rows import feature_store
from train.rows.draft_vocabulary import choose_vocabulary
from train.rows.held_out import judged_on, keep, refuse_others
from train.rows.packed_rows import training_rows
from train.rows.prompt_hashes import keep_hashes
from train.run import open_run
from train.run_dir import refuse_full_disk, reserve

log = logging.getLogger("train")
DEEPER = (
    "tree.depth: %d is deeper than the %d steps that the draft is trained for; "
    "deep nodes are rarely accepted"
)


@entry_point("train", TrainConf)
def main(conf: TrainConf) -> None:
    speak()
    if (found := conf.check()) is not None:
        announce(conf, found)
    parallel = conf.processes(trackers=conf.log.trackers())
    run = open_run(conf, parallel)

    target = parallel.target(conf.target)
    draft = conf.draft.build(target, loss=conf.loss, seed=conf.seed)
    if layers := draft.needs.layers:
        log.info("draft: captures what enters layers %s of %d", layers, target.num_layers)
    reserve(run.folder, draft, target, states=conf.states)
    said = Log(conf.log, run, parallel.accelerator)

    steps = known_steps(run, conf.optim)
    if steps is None or run.progress.step < steps:
        store = feature_store.opened(conf.data, target, draft, parallel)
        rows, held = training_rows(conf, target, parallel, store)
        if run.progress.step:
            refuse_others(held, run.folder)
        if parallel.main:
            keep(held, run.folder)
            keep_hashes(rows, target.tokenizer, run.folder)
        choose_vocabulary(draft, target, rows, conf.data, run.folder if parallel.main else None)
        tree, selection = conf.tree.build(), [row["ids"] for row in held.selection]
        if tree.depth > draft.trained_depth:
            log.warning(DEEPER, tree.depth, draft.trained_depth)
        Loop(
            conf=conf, parallel=parallel, device=parallel.device, target=target, draft=draft,
            rows=rows, store=store, state=run, log=said,
            evaluate=measure(target, selection, tree, conf.evaluation),
        ).run()  # fmt: skip
    else:
        log.info("%s is trained already: only its evaluation is repeated", run.folder)

    if parallel.runs_target:
        evaluation = judged_on(conf, run.folder)
        best = candidate(run.folder / "checkpoint", target)
        report = evaluate(target, [best], tree=conf.tree, conf=evaluation)
        if parallel.main:
            show(report, run.folder, said)
    parallel.wait()
    parallel.accelerator.end_training()


def show(report: Report, folder: Path, said: Log) -> None:
    with refuse_full_disk(folder):
        write(report, folder)
    said.hand_over(summary_table(sections(report)))
    terminal_table(report, CONSOLE)
    log.info("report: %s", folder / "report.html")
    log.info("checkpoint: %s", folder / "checkpoint")


if __name__ == "__main__":
    main()
