"""Output of the tuner: lines for the terminal, a JSON report, and a tree file for each choice."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.eval_prompts.prompts import EvalPrompt, fingerprint_prompts
from infer.report.number_format import format_estimate
from infer.tuning.candidates import TreeCandidate
from infer.tuning.config import TuneConf, format_overrides
from infer.tuning.results import DraftTuning, TuningResult, TuningVerdict
from models.speculate.tree import TreeKind
from models.target.target import Target

MAX_SHOWN_CANDIDATES = 8  # candidates of each result in the terminal; tune.json has all


def format_result(tuning: DraftTuning, result: TuningResult) -> Iterator[str]:
    """Format the candidates with the highest predicted speed-ups, and all that were measured."""
    yield ""
    yield (
        f"{result.draft}, batch {result.batch}, context {result.context}: alone, the target takes "
        f"{1e3 * result.token_s:.2f} ms a token"
    )
    yield f"{'shape':<14}{'nodes':>6}{'depth':>6}{'tau':>6}{'cost':>7}{'predicted':>10}  measured"
    ranked = sorted(
        tuning.candidates, key=lambda candidate: -tuning.predicted_speedup(result, candidate)
    )
    shown = [
        candidate
        for candidate in ranked
        if candidate in ranked[:MAX_SHOWN_CANDIDATES] or candidate.name in result.speedups
    ]
    for candidate in shown:
        measured = result.speedups.get(candidate.name)
        mark = " " if result.cost_curve.num_timings(candidate) else "~"
        yield (
            f"{candidate.name:<14}{candidate.tree.size:>6}{candidate.tree.max_path_length:>6}"
            f"{tuning.expected_tokens[candidate.name].tau:>6.2f}"
            f"{mark}{result.cost_curve.steps(candidate):>6.2f}"
            f"{tuning.predicted_speedup(result, candidate):>10.2f}  "
            f"{format_estimate(measured and asdict(measured))}"
        )
    if result.pick:
        reservation = "" if result.verdict is TuningVerdict.pays else f" ({result.verdict.value})"
        yield f"choice: {result.pick.name}{reservation}"
    else:
        yield f"choice: do not speculate ({result.best.name}: {result.verdict.value})"


def format_summary(tunings: list[DraftTuning], run: Path, conf: TuneConf) -> Iterator[str]:
    """Format one line for each result, and the command that decodes with each choice."""
    yield ""
    yield "cost: autoregressive steps a round (~ interpolated); speed-up over the target alone"
    yield f"{'batch':>5}{'context':>9}  {'draft':<20}{'choice':<16}{'predicted':>9}  measured"
    rows = [(tuning, result) for tuning in tunings for result in tuning.results]
    for tuning, result in sorted(rows, key=lambda row: (row[1].batch, row[1].context)):
        measured = result.speedups[result.best.name]
        yield (
            f"{result.batch:>5}{result.context:>9}  {tuning.name:<20}"
            f"{result.pick.name if result.pick else 'none':<16}"
            f"{tuning.predicted_speedup(result, result.best):>9.2f}  "
            f"{format_estimate(measured and asdict(measured))}"
            f"{'' if result.verdict is TuningVerdict.pays else f'  {result.verdict.value}'}"
        )
    for tuning, result in rows:
        if result.pick:
            checkpoint = format_overrides({"checkpoint": tuning.directory})
            yield (
                f"python -m infer.eval {checkpoint} "
                f"{_eval_overrides(result.pick, run, result, conf)}"
            )
    yield f"all figures: {run / 'tune.json'}"


def _eval_overrides(pick: TreeCandidate, run: Path, result: TuningResult, conf: TuneConf) -> str:
    return " ".join(
        filter(
            None, [pick.tree_overrides(_tree_file(run, result)), conf.eval_overrides(result.batch)]
        )
    )


def _tree_file(run: Path, result: TuningResult) -> Path:
    return run / f"{result.draft.replace('/', '-')}-b{result.batch}-c{result.context}.json"


def write_tree_files(tunings: list[DraftTuning], run: Path, conf: TuneConf) -> None:
    """Write a tree file for each choice: its fields, a static tree's paths, and the overrides."""
    for tuning in tunings:
        for result in tuning.results:
            if result.pick is None:
                continue
            tree: dict[str, Any] = {"tree": result.pick.tree_fields}
            if result.pick.conf.kind is not TreeKind.dynamic:
                tree |= {"paths": result.pick.tree.paths}
            about = _candidate_to_dict(tuning, result, result.pick) | {
                "overrides": _eval_overrides(result.pick, run, result, conf),
                "verdict": result.verdict.value,
                "checkpoint": str(tuning.directory),
                "batch": result.batch,
                "context": result.context,
            }
            _tree_file(run, result).write_text(json.dumps(tree | about) + "\n")


def build_tuning_report(
    tunings: list[DraftTuning], target: Target, device: dict[str, Any], prompts: list[EvalPrompt]
) -> dict[str, Any]:
    """Build the dictionary of all predictions and measurements for tune.json."""
    return {
        "target": target.name,
        "device": device,
        "prompts": {"count": len(prompts), "sha256": fingerprint_prompts(prompts)},
        "drafts": [
            {
                "name": tuning.name,
                "checkpoint": str(tuning.directory),
                "acceptance": tuning.acceptance.tolist(),
                "cells": [_result_to_dict(tuning, result) for result in tuning.results],
            }
            for tuning in tunings
        ],
    }


def _result_to_dict(tuning: DraftTuning, result: TuningResult) -> dict[str, Any]:
    return {
        "batch": result.batch,
        "context": result.context,
        "token_s": result.token_s,
        "pick": result.pick and result.pick.name,
        "best": result.best.name,
        "verdict": result.verdict.value,
        "shapes": [
            _candidate_to_dict(tuning, result, candidate) for candidate in tuning.candidates
        ],
    }


def _candidate_to_dict(
    tuning: DraftTuning, result: TuningResult, candidate: TreeCandidate
) -> dict[str, Any]:
    """Build the report of a candidate; `best_over_it` is the best one's speed over its own."""
    measured, best_over_it = (
        result.speedups.get(candidate.name),
        result.best_over_each.get(candidate.name),
    )
    return {
        "name": candidate.name,
        "nodes": candidate.tree.size,
        "depth": candidate.tree.max_path_length,
        **asdict(tuning.expected_tokens[candidate.name]),
        "cost_steps": result.cost_curve.steps(candidate),
        "cost_timed": result.cost_curve.num_timings(candidate) > 0,
        "predicted_speedup": tuning.predicted_speedup(result, candidate),
        "measured_speedup": measured and asdict(measured),
        "best_over_it": best_over_it and asdict(best_over_it),
    }
