"""Tune the trees or windows of drafts, for each batch and context."""

import itertools
import json
from pathlib import Path

from data.eval_prompts.held_out_files import SELECTION_FILE, find_held_out_file
from data.eval_prompts.prompts import EvalPrompt, load_calibration_prompts
from infer.inputs.checkpoint_paths import find_tracked_run, resolve_target, run_names
from infer.inputs.command_inputs import load_checkpoint_target
from infer.inputs.memory_check import DecodingSize
from infer.measure.context_limits import check_context
from infer.tuning.candidates import select_sweep
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import COMPILER_ERRORS, CostBench, RoundSeconds, read_clock
from infer.tuning.results import (
    SUMMARY_COLUMNS,
    DraftTuning,
    build_summary,
    build_tuning_report,
    collect_results,
    print_acceptance,
    print_result,
    write_best_trees,
    write_choices,
)
from infer.tuning.search import choose_tree, estimate_candidates
from models.device.memory_watch import report_out_of_memory
from models.drafts.base import Draft
from models.drafts.registry import load_draft
from models.io.console import IS_MAIN_PROCESS, print_line, print_table
from models.io.errors import drop_frames, first_line, require
from models.io.files import report_disk_errors
from models.io.tracking import upload_results
from models.parallel.processes import leave_processes
from models.targets.pretrained import load_tokenizer, read_context_length, read_vocab_size
from models.targets.target import Target


def tune_drafts(
    target: Target,
    drafts: dict[str, tuple[Path, Draft]],
    prompts: list[EvalPrompt],
    conf: TuneConf,
    contexts: list[int],
    round_seconds: RoundSeconds = read_clock,
) -> list[DraftTuning]:
    """Tune each draft for each batch and context; print each result as soon as it is known.

    A batch and context whose shapes do not fit or compile is left out, with a line, unless it is the only one.
    """
    tunings, failures = [], []
    for name, (directory, draft) in drafts.items():
        verifier = draft.get_verifying_target(target)
        tuning = estimate_candidates(verifier, name, directory, draft, prompts, conf)
        tunings.append(tuning)
        if not conf.timing:
            print_acceptance(tuning)
            continue
        for batch, context in itertools.product(conf.batch, contexts):
            bench = CostBench(
                target=verifier,
                draft=draft,
                prompts=prompts,
                conf=conf,
                batch=batch,
                context=context,
                round_seconds=round_seconds,
            )
            swept = select_sweep(tuning.candidates) if conf.sweep else []
            try:
                tuning.results.append(choose_tree(bench, tuning, swept))
            except COMPILER_ERRORS as error:
                if verifier.processes > 1:
                    raise
                failures.append(drop_frames(error))
                print_line(f"batch {batch}, context {context}: not tuned: {type(error).__name__}: {first_line(error)}")
            else:
                print_result(tuning, tuning.results[-1])
    if failures and not any(tuning.results for tuning in tunings):
        raise failures[0]
    return tunings


def load_tuning_inputs(conf: TuneConf, directories: list[Path]) -> tuple[Target, list[EvalPrompt], list[int]]:
    """Load the checkpoints' target, prompts and contexts; raise UserError before if a context cannot hold an answer.

    By default these are the held-out prompts that selected the best checkpoint, or for the demo
    prompts of its training data. The final report uses neither.
    """
    target_conf = resolve_target(conf.target, directories)
    path = conf.prompts or find_held_out_file(directories, target_conf, SELECTION_FILE, key="prompts")
    prompts = load_calibration_prompts(
        load_tokenizer(target_conf), path, conf.num_prompts, read_vocab_size(target_conf), conf.template
    )
    longest = max(len(prompt.ids) for prompt in prompts)
    contexts = conf.context or [longest + conf.max_new_tokens]
    require(
        min(contexts) >= longest + conf.max_new_tokens,
        f"context: must hold prompt and answer, {longest} + {conf.max_new_tokens} tokens, "
        f"got {min(contexts)}; raise it or shorten max_new_tokens",
    )
    key = "context" if conf.context else "max_new_tokens"
    check_context(read_context_length(target_conf), max(contexts), key=key)
    size = DecodingSize(
        batch=max(conf.batch) if conf.timing else 1,
        prompt_tokens=longest,
        new_tokens=max(contexts) - longest,
        set_batch=lambda batch: f"batch=[{batch}]",
    )
    return load_checkpoint_target(target_conf, conf, directories, size), prompts, contexts


def tune_checkpoints(
    conf: TuneConf, directories: list[Path], run: Path, round_seconds: RoundSeconds = read_clock
) -> None:
    """Tune the drafts in `directories`; write the choices to the folder `run` and the tracker, and print them."""
    target, prompts, contexts = load_tuning_inputs(conf, directories)
    with target.cpu_threads():
        drafts = {
            name: (directory, load_draft(directory, target))
            for name, directory in zip(run_names(directories), directories, strict=True)
        }
        with report_out_of_memory(
            f"batch: must leave memory for caches of {max(contexts)} tokens a row, got {conf.batch}; "
            "lower batch, max_new_tokens or context, or choose shorter prompts"
        ):
            tunings = tune_drafts(target, drafts, prompts, conf, contexts, round_seconds)
        report = build_tuning_report(tunings, target, prompts)
    leave_processes()
    if not IS_MAIN_PROCESS:
        return
    with report_disk_errors(run):
        for tuning in tunings:
            tuning.remove_trees(run)
        (run / "tune.json").write_text(json.dumps(report) + "\n")
        write = write_choices if conf.timing else write_best_trees
        commands = write(tunings, run, conf)
    if conf.timing:
        print_line("\ncost: autoregressive steps per round (~ interpolated); speed-up over the target alone")
        print_table(SUMMARY_COLUMNS, build_summary(tunings))
    print_line(*commands, f"all figures: {run / 'tune.json'}", sep="\n")
    upload_results(conf.log, run, collect_results(tunings), find_tracked_run(directories))
