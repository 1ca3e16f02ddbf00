"""Choose the tree or window that is fastest for this device, draft and traffic.

python -m infer.tune checkpoint=DIR
python -m infer.tune checkpoint=[A,B] batch=[1,8] context=[1024,8192] prompts=mine.jsonl

Tokens a round are estimated by replay (`infer/measure/replay.py`), the cost of a round from timings
of a few candidates (`infer/tuning/cost_model.py`). The candidate predicted best is timed until no
other is predicted to be better. Then it is measured in decoding, with its neighbors and the target
alone. Limits of the method: docs/tuning.md.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray
from rich.console import Console

from conf.entry import entry_point
from data.eval_prompts import prompts as prompt_files
from data.eval_prompts.prompts import EvalPrompt
from data.mixture.held_out_rows import SELECTION_FILE
from infer.checkpoints import make_writable, open_checkpoints, resolve_target, run_names
from infer.measure.intervals import Estimate, bootstrap_t
from infer.measure.prompt_choice import find_held_out_file, load_calibration_prompts
from infer.measure.replay import (
    Replay,
    ReplayText,
    collect_replay_texts,
    count_all_positions,
    count_on_policy,
    decoding_starts,
)
from infer.tuning.candidates import (
    USER_TREE,
    TreeCandidate,
    add_copied_tokens,
    find_neighbors,
    list_candidates,
)
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import AUTOREGRESSIVE, CostBench, choose_candidate, select_probes
from infer.tuning.output import build_tuning_report, format_result, format_summary, write_tree_files
from infer.tuning.results import DraftTuning, ExpectedTokens, TuningResult
from models.drafts import load_draft
from models.drafts.base import Draft, SpeculativePair
from models.drafts.ngram import NgramDraft
from models.errors import UserError
from models.files import report_disk_errors
from models.speculate.tree import TreeConf, TreeKind
from models.target.target import Target

AcceptedLengths = list[ndarray]  # for each text: the accepted length of a round from each start


def estimate_expected_tokens(
    target: Target, draft: Draft, candidates: list[TreeCandidate], texts: list[ReplayText],
    conf: TuneConf,
) -> dict[str, ExpectedTokens]:  # fmt: skip
    """Estimate the expected tokens of each candidate by replay.

    The longest chain is replayed for all windows. With copied tokens a round accepts the longer of
    the tree's path and the copied chain's.
    """
    without_copies = [candidate for candidate in candidates if not candidate.conf.copied]
    trees = {candidate.name: candidate.tree for candidate in without_copies}
    windows = [c for c in without_copies if c.conf.kind is TreeKind.chain]
    longest = max(windows, key=lambda window: window.size)
    replayed = {name: tree for name, tree in trees.items() if tree.kind is not TreeKind.chain}
    replay = Replay(target, draft, texts, sampling=conf.sampling)
    accepted = replay.accepted_lengths(replayed | {longest.name: longest.tree})
    chain_lengths = accepted[longest.name]
    accepted |= {
        window.name: [np.minimum(lengths, window.size) for lengths in chain_lengths]
        for window in windows
    }
    if conf.copied:
        chain = TreeConf(kind=TreeKind.chain, depth=conf.copied).build()
        lookup = Replay(target, NgramDraft(), texts, sampling=conf.sampling)
        (copied_lengths,) = lookup.accepted_lengths({"lookup": chain}).values()
        accepted |= {
            add_copied_tokens(candidate, conf.copied).name: list(
                map(np.maximum, accepted[candidate.name], copied_lengths)
            )
            for candidate in without_copies
        }
    return {c.name: _count_expected_tokens(accepted[c.name], texts) for c in candidates}


def _count_expected_tokens(accepted: AcceptedLengths, texts: list[ReplayText]) -> ExpectedTokens:
    rounds = sum(len(decoding_starts(lengths)) for lengths in accepted)
    tau, all_positions = (
        sums.sum(0) for sums in (count_on_policy(accepted), count_all_positions(accepted))
    )
    return ExpectedTokens(
        kept=sum(text.num_starts for text in texts) / max(rounds, 1),
        tau=tau[0] / max(tau[1], 1),
        all_positions=all_positions[0] / max(all_positions[1], 1),
    )  # fmt: skip


def choose_tree(bench: CostBench, tuning: DraftTuning, conf: TuneConf) -> TuningResult:
    """Choose a candidate and measure it, its neighbors and, with `sweep`, many others."""
    candidates = tuning.candidates
    swept = select_sweep(candidates) if conf.sweep else []
    for candidate in [None, *dict.fromkeys(select_probes(candidates) + swept)]:
        bench.decoder_for(candidate)
    kept_tokens = {name: tokens.kept for name, tokens in tuning.expected_tokens.items()}
    curve, best = choose_candidate(bench.measure_steps, candidates, kept_tokens)
    for candidate in find_neighbors(best, candidates):
        curve.add(candidate, bench.measure_steps(candidate))
    measured = list(dict.fromkeys([best, *find_neighbors(best, candidates), *swept]))
    sums = bench.benchmark_trees(measured, conf.repeats)
    baseline = sums[AUTOREGRESSIVE]
    for candidate in find_neighbors(best, candidates):
        ratio = estimate_speedup(sums[candidate.name], sums[best.name])
        if ratio and ratio.ci95 and ratio.ci95[0] > 1:
            best = candidate
    speedups = {
        candidate.name: estimate_speedup(sums[candidate.name], baseline) for candidate in measured
    }
    best_speedup = speedups[best.name]
    return TuningResult(
        draft=tuning.name,
        batch=bench.batch,
        context=bench.context,
        cost_curve=curve,
        best=best,
        token_s=float(baseline[:, 1].sum() / baseline[:, 0].sum()),
        speedups=speedups,
        pick=best if best_speedup and best_speedup.mean > 1 else None,
        best_over_each={
            candidate.name: estimate_speedup(sums[best.name], sums[candidate.name])
            for candidate in measured
        },
    )


def estimate_speedup(ours: ndarray, theirs: ndarray) -> Estimate | None:
    """Estimate our tokens a second over theirs, paired by prompt; rows are (tokens, seconds)."""
    rows = np.concatenate([ours, theirs], 1)
    return bootstrap_t(rows, lambda m: m[..., 0] / m[..., 1] * m[..., 3] / m[..., 2])


def select_sweep(candidates: list[TreeCandidate]) -> list[TreeCandidate]:
    """Select every window, the user's tree, and trees of three kinds and four budgets."""
    sizes = sorted({c.size for c in candidates if c.family == "static"})
    kinds = [f for f in {c.family for c in candidates} if f.partition("+")[0] == "dynamic"]
    trees = [c for c in candidates if c.family in ("static", *kinds)]
    sampled_trees = [c for c in trees if c.size in sizes[1:3] + sizes[-2:]]
    return [c for c in candidates if c.family in ("chain", USER_TREE)] + sampled_trees


def tune_drafts(
    target: Target, drafts: dict[str, tuple[Path, Draft]], prompts: list[EvalPrompt],
    conf: TuneConf, print_line: Callable[[str], None],
) -> list[DraftTuning]:  # fmt: skip
    """Tune each draft for each batch and context."""
    tunings = []
    for name, (directory, draft) in drafts.items():
        draft_target = SpeculativePair(target=target, draft=draft).verifying_target
        depth = min(conf.depth, draft.max_depth)
        print_line(f"{name}: replaying the target's answers to {len(prompts)} prompts")
        texts = collect_replay_texts(
            draft_target,
            prompts,
            sampling=conf.sampling,
            max_new_tokens=conf.max_new_tokens,
            layers=draft.needs.layers,
            lookahead=max(depth, conf.copied, conf.tree.build().max_path_length),
        )
        if not any(text.num_starts for text in texts):
            raise UserError(
                "prompts: must have answers of more than one token, got none; choose others"
            )
        counts = Replay(draft_target, draft, texts, sampling=conf.sampling).count_acceptance(
            depth, conf.ranks
        )
        candidates = list_candidates(
            counts.acceptance(), node_budgets=conf.nodes, copied=conf.copied, user_tree=conf.tree
        )
        expected_tokens = estimate_expected_tokens(draft_target, draft, candidates, texts, conf)
        tuning = DraftTuning(
            name=name, directory=directory, candidates=candidates, expected_tokens=expected_tokens,
            acceptance=counts.acceptance(),
        )  # fmt: skip
        needed_context = max(len(prompt.ids) for prompt in prompts) + conf.max_new_tokens
        for batch in conf.batch:
            for context in conf.context or [needed_context]:
                bench = CostBench(
                    target=draft_target, draft=draft, prompts=prompts, sampling=conf.sampling,
                    batch=batch, context=context, max_new_tokens=conf.max_new_tokens,
                    print_line=print_line,
                )  # fmt: skip
                tuning.results.append(choose_tree(bench, tuning, conf))
                torch.compiler.reset()  # drops these graphs: the next shapes are different
                for line in format_result(tuning, tuning.results[-1]):
                    print_line(line)
        tunings.append(tuning)
    return tunings


def check_tune_config(conf: TuneConf) -> None:
    """Check the tree and the prompts file before a model is loaded, else raise UserError."""
    conf.tree.build()
    if conf.prompts is not None:
        prompt_files.read_prompt_rows(conf.prompts, key="prompts")


def check_prompts_fit(conf: TuneConf, prompts: list[EvalPrompt]) -> None:
    """Check that prompts and answers fit in every context; raise UserError otherwise."""
    longest = max(len(prompt.ids) for prompt in prompts)
    for context in conf.context or []:
        if context < longest + conf.max_new_tokens:
            raise UserError(
                f"context: must hold prompt and answer, {longest} + {conf.max_new_tokens} tokens, "
                f"got {context}; raise it or shorten max_new_tokens"
            )


@entry_point("tune", TuneConf)
def main(conf: TuneConf) -> None:
    print_line = Console(soft_wrap=True, highlight=False).print
    directories = open_checkpoints(conf.checkpoint, print_line)
    run = Path(conf.output_dir) / conf.run_name
    check_tune_config(conf)
    make_writable(run)
    target_conf = resolve_target(conf.target, directories)
    prompts_path = conf.prompts or find_held_out_file(
        directories, target_conf, SELECTION_FILE, key="prompts"
    )
    target = target_conf.build(conf.device.build())
    prompts = load_calibration_prompts(target, prompts_path, conf.num_prompts)
    check_prompts_fit(conf, prompts)
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        drafts = {
            name: (directory, load_draft(directory, target)[1])
            for name, directory in zip(run_names(directories), directories, strict=True)
        }
        tunings = tune_drafts(target, drafts, prompts, conf, print_line)
        device = target.device.describe()
    with report_disk_errors(run):
        (run / "tune.json").write_text(
            json.dumps(build_tuning_report(tunings, target, device, prompts)) + "\n"
        )
        write_tree_files(tunings, run, conf)
    for line in format_summary(tunings, run, conf):
        print_line(line)


if __name__ == "__main__":
    main()
