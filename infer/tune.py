"""Choose the tree or window that is fastest for this device, draft and traffic.

python -m infer.tune checkpoint=DIR
python -m infer.tune checkpoint=[A,B] batch=[1,8] context=[1024,8192] prompts=mine.jsonl

Tokens per round are estimated by replay (`infer/measure/replay.py`), the cost of a round from
timings of a few candidates (`infer/tuning/cost_model.py`). The candidate predicted best is timed
until no other is predicted to be better. Then it is measured in decoding, beside its neighbors and
the target without a draft. Limits of the method: docs/tuning.md.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray

from conf.entry import entry_point
from data.eval_prompts.prompts import EvalPrompt
from infer.checkpoint_paths import open_checkpoints, run_names
from infer.command_inputs import check_inputs, load_calibration
from infer.measure.intervals import Estimate, bootstrap_t
from infer.measure.replay import (
    Replay,
    ReplayText,
    collect_replay_texts,
    count_all_positions,
    count_on_policy,
)
from infer.tuning.candidates import (
    TreeCandidate,
    add_copied_tokens,
    find_neighbors,
    list_candidates,
    select_sweep,
)
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import AUTOREGRESSIVE, CostBench, choose_candidate, select_probes
from infer.tuning.results import (
    DraftTuning,
    ExpectedTokens,
    TuningResult,
    build_tuning_report,
    format_result,
    format_summary,
    write_tree_files,
)
from models.console import print_line, setup_logging
from models.drafts import load_draft
from models.drafts.base import Draft, SpeculativePair
from models.drafts.ngram import NgramDraft
from models.errors import require
from models.files import report_disk_errors
from models.lock import claim_run_folder
from models.speculate.tree import TreeConf, TreeKind
from models.target.target import Target


def estimate_expected_tokens(
    target: Target, draft: Draft, candidates: list[TreeCandidate], texts: list[ReplayText],
    conf: TuneConf,
) -> dict[str, ExpectedTokens]:  # fmt: skip
    """Return the expected tokens of each candidate by name, estimated by replay.

    Of the windows only the longest is replayed: a shorter one accepts the same tokens up to its
    length. With copied tokens, a round accepts the longer of the tree's path and the copies'.
    """
    without_copies = [candidate for candidate in candidates if not candidate.conf.ngram_tokens]
    windows = [c for c in without_copies if c.conf.kind is TreeKind.chain]
    longest = max(windows, key=lambda window: window.size)
    replay = Replay(target, draft, texts, sampling=conf.sampling)
    accepted = replay.accepted_lengths(
        {c.name: c.tree for c in without_copies if c not in windows} | {longest.name: longest.tree}
    )
    chain_lengths = accepted[longest.name]
    for window in windows:
        accepted[window.name] = [np.minimum(lengths, window.size) for lengths in chain_lengths]
    if conf.ngram_tokens:
        chain = TreeConf(kind=TreeKind.chain, depth=conf.ngram_tokens).build()
        lookup = Replay(target, NgramDraft(), texts, sampling=conf.sampling)
        copied_lengths = lookup.accepted_lengths({"lookup": chain})["lookup"]
        for candidate in without_copies:
            accepted[add_copied_tokens(candidate, conf.ngram_tokens).name] = list(
                map(np.maximum, accepted[candidate.name], copied_lengths)
            )
    return {c.name: _count_expected_tokens(accepted[c.name], texts) for c in candidates}


def _count_expected_tokens(accepted: list[ndarray], texts: list[ReplayText]) -> ExpectedTokens:
    """Return tokens per round; `accepted` has the accepted tokens from each start of each text."""
    tokens, rounds = count_on_policy(accepted).sum(0)
    all_tokens, all_rounds = count_all_positions(accepted).sum(0)
    return ExpectedTokens(
        kept=sum(text.num_starts for text in texts) / max(rounds, 1),
        tau=tokens / max(rounds, 1), all_positions=all_tokens / max(all_rounds, 1),
    )  # fmt: skip


def choose_tree(bench: CostBench, tuning: DraftTuning, conf: TuneConf) -> TuningResult:
    """Choose a candidate; measure it, its neighbors and, with `sweep`, many others.

    A neighbor replaces the choice if it is faster beyond noise.
    """
    candidates = tuning.candidates
    swept = select_sweep(candidates) if conf.sweep else []
    for candidate in [None, *dict.fromkeys(select_probes(candidates) + swept)]:
        bench.decoder_for(candidate)  # compiles it, before any is timed
    kept_tokens = {name: tokens.kept for name, tokens in tuning.expected_tokens.items()}
    curve, best = choose_candidate(bench.measure_steps, candidates, kept_tokens)
    for candidate in find_neighbors(best, candidates):
        curve.add(candidate, bench.measure_steps(candidate))
    measured = list(dict.fromkeys([best, *find_neighbors(best, candidates), *swept]))
    tokens_seconds = bench.benchmark_trees(measured)
    baseline = tokens_seconds[AUTOREGRESSIVE]
    for candidate in find_neighbors(best, candidates):
        speedup = estimate_speedup(tokens_seconds[candidate.name], tokens_seconds[best.name])
        if speedup and speedup.ci95 and speedup.ci95[0] > 1:
            best = candidate
    speedups = {c.name: estimate_speedup(tokens_seconds[c.name], baseline) for c in measured}
    best_speedup = speedups[best.name]
    return TuningResult(
        batch=bench.batch,
        context=bench.context,
        cost_curve=curve,
        best=best,
        token_s=float(baseline[:, 1].sum() / baseline[:, 0].sum()),
        speedups=speedups,
        pick=best if best_speedup and best_speedup.mean > 1 else None,
        best_over_each={
            candidate.name: estimate_speedup(
                tokens_seconds[best.name], tokens_seconds[candidate.name]
            )
            for candidate in measured
        },
    )


def estimate_speedup(ours: ndarray, theirs: ndarray) -> Estimate | None:
    """Estimate our tokens/s over theirs, paired by prompt; the columns are tokens and seconds."""
    rows = np.concatenate([ours, theirs], 1)
    return bootstrap_t(
        rows, lambda means: means[..., 0] / means[..., 1] * means[..., 3] / means[..., 2]
    )


def tune_drafts(
    target: Target, drafts: dict[str, tuple[Path, Draft]], prompts: list[EvalPrompt], conf: TuneConf
) -> list[DraftTuning]:
    """Tune each draft for each batch and context; print each result as soon as it is known."""
    tunings = []
    needed_context = max(len(prompt.ids) for prompt in prompts) + conf.max_new_tokens
    for name, (directory, draft) in drafts.items():
        draft_target = SpeculativePair(target=target, draft=draft).verifying_target
        tuning = _estimate_candidates(draft_target, name, directory, draft, prompts, conf)
        for batch, context in itertools.product(conf.batch, conf.context or [needed_context]):
            bench = CostBench(
                target=draft_target, draft=draft, prompts=prompts, conf=conf, batch=batch,
                context=context,
            )  # fmt: skip
            tuning.results.append(choose_tree(bench, tuning, conf))
            torch.compiler.reset()  # drops these graphs: the next shapes are different
            print_line(*format_result(tuning, tuning.results[-1]), sep="\n")
        tunings.append(tuning)
    return tunings


def _estimate_candidates(
    target: Target, name: str, directory: Path, draft: Draft, prompts: list[EvalPrompt],
    conf: TuneConf,
) -> DraftTuning:  # fmt: skip
    """Return the candidates of a draft with their expected tokens, from one run of the target.

    Raise UserError if no answer has more than one token.
    """
    depth = min(conf.depth, draft.max_depth)
    print_line(f"{name}: replaying the target's answers to {len(prompts)} prompts")
    texts = collect_replay_texts(
        target, prompts, sampling=conf.sampling, max_new_tokens=conf.max_new_tokens,
        layers=draft.needs.layers,
        lookahead=max(depth, conf.ngram_tokens, conf.tree.build().max_path_length),
    )  # fmt: skip
    require(
        any(text.num_starts for text in texts),
        "prompts: must have answers of more than one token, got none; choose others",
    )
    replay = Replay(target, draft, texts, sampling=conf.sampling)
    acceptance = replay.count_acceptance(depth, conf.ranks).acceptance()
    candidates = list_candidates(
        acceptance, node_budgets=conf.nodes, ngram_tokens=conf.ngram_tokens, user_tree=conf.tree
    )
    return DraftTuning(
        name=name, directory=directory, candidates=candidates, acceptance=acceptance,
        expected_tokens=estimate_expected_tokens(target, draft, candidates, texts, conf),
    )  # fmt: skip


def check_prompts_fit(conf: TuneConf, prompts: list[EvalPrompt]) -> None:
    """Check that prompts and answers fit in every context; raise UserError otherwise."""
    longest = max(len(prompt.ids) for prompt in prompts)
    for context in conf.context or []:
        require(
            context >= longest + conf.max_new_tokens,
            f"context: must hold prompt and answer, {longest} + {conf.max_new_tokens} tokens, "
            f"got {context}; raise it or shorten max_new_tokens",
        )


@entry_point("tune", TuneConf)
def main(conf: TuneConf) -> None:
    setup_logging()
    directories = open_checkpoints(conf.checkpoint, print_line)
    run = Path(conf.output_dir) / conf.run_name
    check_inputs(conf.tree, conf.prompts, key="prompts")
    claim_run_folder(run)
    target, prompts = load_calibration(conf, directories)
    check_prompts_fit(conf, prompts)
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        drafts = {
            name: (directory, load_draft(directory, target)[1])
            for name, directory in zip(run_names(directories), directories, strict=True)
        }
        tunings = tune_drafts(target, drafts, prompts, conf)
        report = build_tuning_report(tunings, target, target.device.describe(), prompts)
    with report_disk_errors(run):
        (run / "tune.json").write_text(json.dumps(report) + "\n")
        write_tree_files(tunings, run, conf)
    print_line(*format_summary(tunings, run, conf), sep="\n")


if __name__ == "__main__":
    main()
