"""Search the fastest candidate of one draft for one device, batch size and context.

Tokens per round are estimated by replay (`infer/measure/replay.py`), the cost of a round from timings of a few
candidates (`infer/tuning/cost_model.py`); the best is then measured in decoding, beside its neighbors and no draft.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray

from data.eval_prompts.prompts import EvalPrompt
from infer.measure.replay import Replay, ReplayText, collect_replay_texts, count_on_policy
from infer.results.intervals import Estimate, bootstrap_t
from infer.results.metrics import ratio_of_ratios
from infer.results.records import AUTOREGRESSIVE
from infer.tuning.candidates import TreeCandidate, add_copied_tokens, find_neighbors, list_candidates
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import CostBench, CostCurve, choose_candidate, select_probes
from infer.tuning.results import DraftTuning, ExpectedTokens, TuningResult
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.io.console import print_line
from models.io.errors import require
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.tree import TreeKind

AcceptedLengths = list[ndarray]  # of each text: the accepted tokens from each start


def estimate_candidates(
    target: Target, name: str, directory: Path, draft: Draft, prompts: list[EvalPrompt], conf: TuneConf
) -> DraftTuning:
    """Return the candidates with their expected tokens, from one run of the target; raise UserError without rounds."""
    depth = min(conf.depth, draft.max_depth)
    # `infer.eval` decodes with lookup in a chain that the draft can propose too.
    conf = replace(conf, ngram_windows=[window for window in conf.ngram_windows if window <= draft.max_depth])
    print_line(f"{name}: replaying the target's answers to {len(prompts)} prompts")
    texts = collect_replay_texts(
        target,
        prompts,
        sampling=conf.sampling,
        max_new_tokens=conf.max_new_tokens,
        layers=draft.needs.layers,
        lookahead=max(depth, conf.longest_copy),
    )
    require(
        any(text.num_starts for text in texts),
        "prompts: must have answers of more than one token, got none; choose others",
    )
    replay = Replay(target, draft, texts, sampling=conf.sampling)
    vocab_size = target.vocab_size if draft.kept_ids is None else len(draft.kept_ids)
    counter = replay.count_acceptance(depth, min(conf.ranks, vocab_size))
    acceptance = counter.acceptance()
    candidates = list_candidates(
        acceptance,
        node_budgets=conf.nodes,
        ngram_tokens=conf.ngram_tokens,
        user_tree=conf.tree,
        ngram_windows=conf.ngram_windows,
    )
    return DraftTuning(
        name=name,
        directory=directory,
        candidates=candidates,
        acceptance=acceptance,
        rounds=counter.rounds.int().tolist(),
        expected_tokens=estimate_expected_tokens(target, draft, candidates, texts, conf),
    )


def estimate_expected_tokens(
    target: Target, draft: Draft, candidates: list[TreeCandidate], texts: list[ReplayText], conf: TuneConf
) -> dict[str, ExpectedTokens]:
    """Return the expected tokens of each candidate by name, estimated by replay.

    Of the windows only the longest is replayed: a shorter one accepts the same tokens up to its
    length. With copied tokens, a round accepts the longer of the tree's path and the copies'.
    """
    lookups = [candidate for candidate in candidates if candidate.is_lookup]
    without_copies = [c for c in candidates if not (c.conf.ngram_tokens or c.is_lookup)]
    windows = [c for c in without_copies if c.conf.kind is TreeKind.chain]
    longest = max(windows, key=lambda window: window.size)
    replay = Replay(target, draft, texts, sampling=conf.sampling)
    accepted = replay.accepted_lengths(
        {c.name: c.tree for c in without_copies if c not in windows} | {longest.name: longest.tree}
    )
    chain_lengths = accepted[longest.name]
    accepted |= {window.name: _cut_lengths(chain_lengths, window.size) for window in windows}
    if conf.longest_copy:
        chain = TreeConf(kind=TreeKind.chain, depth=conf.longest_copy).build()
        lookup = Replay(target, NgramDraft(), texts, sampling=conf.sampling)
        copied_lengths = lookup.accepted_lengths({"lookup": chain})["lookup"]
        accepted |= {c.name: _cut_lengths(copied_lengths, c.size) for c in lookups}
        copied_lengths = _cut_lengths(copied_lengths, conf.ngram_tokens)
        for candidate in without_copies if conf.ngram_tokens else ():
            name = add_copied_tokens(candidate, conf.ngram_tokens).name
            accepted[name] = list(map(np.maximum, accepted[candidate.name], copied_lengths))
    return {c.name: _count_expected_tokens(accepted[c.name], texts) for c in candidates}


def _cut_lengths(accepted: AcceptedLengths, window: int) -> AcceptedLengths:
    """Return what a chain of `window` tokens accepts, from what a longer one does."""
    return [np.minimum(lengths, window) for lengths in accepted]


def _count_expected_tokens(accepted: AcceptedLengths, texts: list[ReplayText]) -> ExpectedTokens:
    tokens, rounds = count_on_policy(accepted).sum(0)
    delivered = sum(text.num_starts for text in texts)
    return ExpectedTokens(delivered=delivered / max(rounds, 1), tau=tokens / max(rounds, 1))


MIN_COMPARED_PROMPTS = 3  # whose interval is narrow enough to call two shapes equally fast


def choose_tree(bench: CostBench, tuning: DraftTuning, also_measured: Sequence[TreeCandidate] = ()) -> TuningResult:
    """Predict the best candidate; measure it, its neighbors and `also_measured`; choose the simplest of the fastest."""
    shapes = list(dict.fromkeys([*also_measured, *select_probes(tuning.candidates)]))
    ready = bench.compile_in_time(shapes)  # before any is timed
    probes = [candidate for candidate in select_probes(tuning.candidates) if candidate in ready]
    if not bench.has_time() or all(probe.family != "chain" for probe in probes):  # too few to predict the others
        measured, candidates, curve = ready, ready, CostCurve()
        for candidate in measured:
            if bench.has_time():
                curve.add(candidate, bench.measure_steps(candidate))
    else:
        candidates = [c for c in tuning.candidates if c in ready or c not in shapes]
        delivered = {name: tokens.delivered for name, tokens in tuning.expected_tokens.items()}
        curve, predicted = choose_candidate(
            bench.measure_steps,
            candidates,
            delivered,
            probes=probes,
            has_time=bench.has_time,
            try_compile=bench.try_compile,
        )
        neighbors = find_neighbors(predicted, candidates) if bench.has_time() else []
        neighbors = [neighbor for neighbor in neighbors if bench.try_compile(neighbor) is None]
        for candidate in neighbors:
            curve.add(candidate, bench.measure_steps(candidate))
        also_measured = [candidate for candidate in also_measured if candidate in ready]
        measured = list(dict.fromkeys([predicted, *neighbors, *also_measured]))
    tokens_seconds = bench.benchmark_trees(measured)
    torch.compiler.reset()  # drops these graphs: what comes next has other shapes
    baseline = tokens_seconds[AUTOREGRESSIVE]
    best = choose_simplest(measured, tokens_seconds)
    return TuningResult(
        batch=bench.batch,
        context=bench.context,
        candidates=[candidate for candidate in candidates if candidate.name not in bench.failures],
        cost_curve=curve,
        num_prompts=len(baseline),
        best=best,
        token_s=float(baseline[:, 1].sum() / baseline[:, 0].sum()),
        speedups={c.name: estimate_speedup(tokens_seconds[c.name], baseline) for c in measured},
        best_over_each={c.name: estimate_speedup(tokens_seconds[best.name], tokens_seconds[c.name]) for c in measured},
    )


def choose_simplest(measured: list[TreeCandidate], tokens_seconds: dict[str, ndarray]) -> TreeCandidate:
    """Return the smallest candidate that the fastest one does not beat beyond noise, with the draft if that has it.

    Of one or two prompts the fastest one is the choice: the interval of two holds nearly any ratio.
    """
    tokens, seconds = np.stack([tokens_seconds[candidate.name].sum(0) for candidate in measured], 1)
    speeds = tokens / np.maximum(seconds, np.finfo(float).tiny)  # no answer may have taken a round
    fastest = measured[int(speeds.argmax())]
    ties = [fastest]
    if len(tokens_seconds[fastest.name]) < MIN_COMPARED_PROMPTS:
        return fastest
    for candidate in (c for c in measured if c.is_lookup == fastest.is_lookup):
        speedup = estimate_speedup(tokens_seconds[fastest.name], tokens_seconds[candidate.name])
        if speedup and speedup.ci95 and speedup.ci95[0] <= 1:
            ties.append(candidate)
    return min(ties, key=lambda candidate: candidate.tree.size)


def estimate_speedup(ours: ndarray, theirs: ndarray) -> Estimate | None:
    """Estimate our tokens/s over theirs, paired by prompt; the columns are tokens and seconds."""
    return bootstrap_t(np.hstack([ours, theirs]), ratio_of_ratios, support=(0.0, np.inf))
