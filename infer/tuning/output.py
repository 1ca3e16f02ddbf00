"""What the tuner says: lines for the terminal, everything as JSON, a file for each choice."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.eval_prompts.prompts import EvalPrompt, fingerprint
from infer.report.number_format import estimate
from infer.tuning.candidates import Shape
from infer.tuning.config import TuneConf, overrides
from infer.tuning.results import Cell, Tuned, Verdict
from models.speculate.tree import TreeKind
from models.target.target import Target

SHOWN = 8  # shapes that the terminal shows of each answer; tune.json has all


def cell_lines(tuned: Tuned, cell: Cell) -> Iterator[str]:
    """The shapes that promise most, and those that were decoded with."""
    yield ""
    yield (
        f"{cell.draft}, batch {cell.batch}, context {cell.context}: alone, the target takes "
        f"{1e3 * cell.token_s:.2f} ms a token"
    )
    yield f"{'shape':<14}{'nodes':>6}{'depth':>6}{'tau':>6}{'cost':>7}{'predicted':>10}  measured"
    ranked = sorted(tuned.shapes, key=lambda one: -tuned.predicted(cell, one))
    shown = [one for one in ranked if one in ranked[:SHOWN] or one.name in cell.speedups]
    for one in shown:
        measured = cell.speedups.get(one.name)
        timed = " " if cell.curve.times(one) else "~"
        yield (
            f"{one.name:<14}{one.tree.size:>6}{one.tree.deepest:>6}"
            f"{tuned.worth[one.name].tau:>6.2f}{timed}{cell.curve.steps(one):>6.2f}"
            f"{tuned.predicted(cell, one):>10.2f}  {estimate(measured and asdict(measured))}"
        )
    if cell.pick:
        sure = "" if cell.verdict is Verdict.pays else f" ({cell.verdict.value})"
        yield f"choice: {cell.pick.name}{sure}"
    else:
        yield f"choice: do not speculate ({cell.best.name}: {cell.verdict.value})"


def summary(found: list[Tuned], run: Path, conf: TuneConf) -> Iterator[str]:
    """One line an answer: which draft and which shape, and how to decode with it."""
    yield ""
    yield "cost: autoregressive steps a round (~ interpolated); speed-up over the target alone"
    yield f"{'batch':>5}{'context':>9}  {'draft':<20}{'choice':<16}{'predicted':>9}  measured"
    rows = [(tuned, cell) for tuned in found for cell in tuned.cells]
    for tuned, cell in sorted(rows, key=lambda row: (row[1].batch, row[1].context)):
        measured = cell.speedups[cell.best.name]
        yield (
            f"{cell.batch:>5}{cell.context:>9}  {tuned.name:<20}"
            f"{cell.pick.name if cell.pick else 'none':<16}"
            f"{tuned.predicted(cell, cell.best):>9.2f}  {estimate(measured and asdict(measured))}"
            f"{'' if cell.verdict is Verdict.pays else f'  {cell.verdict.value}'}"
        )
    for tuned, cell in rows:
        if cell.pick:
            draft = overrides({"checkpoint": tuned.directory})
            yield f"python -m infer.eval {draft} {_overrides(cell.pick, run, cell, conf)}"
    yield f"all figures: {run / 'tune.json'}"


def _overrides(pick: Shape, run: Path, cell: Cell, conf: TuneConf) -> str:
    return " ".join(filter(None, [pick.overrides(_file(run, cell)), conf.carried(cell.batch)]))


def _file(run: Path, cell: Cell) -> Path:
    return run / f"{cell.draft.replace('/', '-')}-b{cell.batch}-c{cell.context}.json"


def write_trees(found: list[Tuned], run: Path, conf: TuneConf) -> None:
    """A tree file for each choice: its fields, paths where it is one tree, and the overrides."""
    for tuned in found:
        for cell in tuned.cells:
            if cell.pick is None:
                continue
            tree: dict[str, Any] = {"tree": cell.pick.fields}
            if cell.pick.conf.kind is not TreeKind.dynamic:
                tree |= {"paths": cell.pick.tree.paths}
            about = _row(tuned, cell, cell.pick) | {
                "overrides": _overrides(cell.pick, run, cell, conf), "verdict": cell.verdict.value,
                "checkpoint": str(tuned.directory), "batch": cell.batch, "context": cell.context,
            }  # fmt: skip
            _file(run, cell).write_text(json.dumps(tree | about) + "\n")


def content(
    found: list[Tuned], target: Target, device: dict[str, Any], prompts: list[EvalPrompt]
) -> dict[str, Any]:
    """Everything that was predicted and measured."""
    return {
        "target": target.name,
        "device": device,
        "prompts": {"count": len(prompts), "sha256": fingerprint(prompts)},
        "drafts": [
            {
                "name": tuned.name,
                "checkpoint": str(tuned.directory),
                "acceptance": tuned.acceptance.tolist(),
                "cells": [_cell(tuned, cell) for cell in tuned.cells],
            }
            for tuned in found
        ],
    }


def _cell(tuned: Tuned, cell: Cell) -> dict[str, Any]:
    return {
        "batch": cell.batch,
        "context": cell.context,
        "token_s": cell.token_s,
        "pick": cell.pick and cell.pick.name,
        "best": cell.best.name,
        "verdict": cell.verdict.value,
        "shapes": [_row(tuned, cell, one) for one in tuned.shapes],
    }


def _row(tuned: Tuned, cell: Cell, one: Shape) -> dict[str, Any]:
    """`best_over_it`: tokens/s of the choice over its, prompt by prompt."""
    measured, over = cell.speedups.get(one.name), cell.of_best.get(one.name)
    return {
        "name": one.name,
        "nodes": one.tree.size,
        "depth": one.tree.deepest,
        **asdict(tuned.worth[one.name]),
        "cost_steps": cell.curve.steps(one),
        "cost_timed": cell.curve.times(one) > 0,
        "predicted_speedup": tuned.predicted(cell, one),
        "measured_speedup": measured and asdict(measured),
        "best_over_it": over and asdict(over),
    }
