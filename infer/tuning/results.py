"""Results of tuning: the choice for each setting, printed as lines and written as files."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from data.eval_prompts.prompts import EvalPrompt, fingerprint_prompts
from infer.measure.intervals import Estimate
from infer.report.number_format import format_estimate
from infer.tuning.candidates import TreeCandidate
from infer.tuning.config import TuneConf, format_overrides
from infer.tuning.cost_model import CostCurve
from models.target.target import Target
from models.tracking import TrackedResults

TABLE_HEAD = f"{'shape':<14}{'nodes':>6}{'depth':>6}{'tau':>6}"
MAX_SHOWN_CANDIDATES = 8  # candidates of each result in the terminal; tune.json has all


@dataclass(kw_only=True)
class ExpectedTokens:
    """The tokens per round of a candidate, estimated by replay."""

    delivered: float  # per round, without the tokens after the answer's end
    tau: float  # acceptance length
    all_positions: float  # acceptance length if rounds began at every token equally often


class TuningVerdict(Enum):
    """The comparison of the best candidate with no speculation, by its speed-up's interval."""

    pays = "pays"
    open = "not told apart from not speculating"
    loses = "does not pay"
    unmeasured = "was not measured: no answer took a round"

    @classmethod
    def from_speedup(cls, speedup: Estimate | None) -> "TuningVerdict":
        """Return the verdict on a measured speed-up."""
        if speedup is None:
            return cls.unmeasured
        low, high = speedup.ci95 or (-np.inf, np.inf)
        return cls.pays if low > 1 else cls.loses if high < 1 else cls.open


@dataclass(kw_only=True)
class TuningResult:
    """The result for one draft, batch size and context."""

    batch: int
    context: int
    token_s: float  # seconds per token of the target alone; rows in a batch share a step's time
    cost_curve: CostCurve
    best: TreeCandidate  # the best candidate, even if it is slower than no speculation
    speedups: dict[str, Estimate | None]  # of the measured candidates, over no speculation
    best_over_each: dict[str, Estimate | None]  # speed of `best` over theirs, paired by prompt

    @property
    def verdict(self) -> TuningVerdict:
        """Return the verdict on the best candidate's measured speed-up."""
        return TuningVerdict.from_speedup(self.speedups[self.best.name])

    @property
    def choice(self) -> TreeCandidate | None:
        """Return the faster point estimate: `best`, or None for no speculation."""
        speedup = self.speedups[self.best.name]
        return self.best if speedup and speedup.mean > 1 else None

    @property
    def choice_name(self) -> str:
        return self.choice.name if self.choice else "none"

    def format_speedup(self, candidate: TreeCandidate) -> str:
        """Format the measured speed-up of a candidate, or a dash if it was not measured."""
        return format_estimate(self.speedups.get(candidate.name))


@dataclass(kw_only=True)
class DraftTuning:
    """One draft's candidates with their expected tokens, and a result for each batch and context.

    Expected tokens do not depend on batch and context. `acceptance[d, r]` is the share of rounds in
    which the target's token is candidate r at depth d, among the `rounds[d]` rounds in which
    candidate 0 was right at every depth before.
    """

    name: str
    directory: Path
    candidates: list[TreeCandidate]
    expected_tokens: dict[str, ExpectedTokens]
    acceptance: Float[ndarray, "depth ranks"]
    rounds: list[int]
    results: list[TuningResult] = field(default_factory=list)

    def predicted_speedup(self, result: TuningResult, candidate: TreeCandidate) -> float:
        """Predict a candidate's speed-up: its expected tokens over the cost of its round."""
        return self.expected_tokens[candidate.name].delivered / result.cost_curve.steps(candidate)

    def describe_candidate(self, candidate: TreeCandidate) -> str:
        """Return the first columns of a candidate's row, as in TABLE_HEAD."""
        tree, tau = candidate.tree, self.expected_tokens[candidate.name].tau
        return f"{candidate.name:<14}{tree.size:>6}{tree.max_path_length:>6}{tau:>6.2f}"

    def eval_command(self, file: Path, batch: int, conf: TuneConf) -> str:
        """Return the command that decodes with the tree in `file` as the tuning did."""
        overrides = format_overrides({"checkpoint": self.directory, "tree.file": file})
        return f"python -m infer.eval {overrides} {conf.eval_overrides(batch)}".rstrip()


def format_acceptance(tuning: DraftTuning) -> Iterator[str]:
    """Yield the table of acceptance, and the tokens per round of each candidate."""
    yield "share of rounds in which the target's token is candidate 0, 1, ... of the draft,"
    yield "among those in which candidate 0 was right at every depth before"
    ranks = range(tuning.acceptance.shape[1])
    yield "depth  rounds  " + "  ".join(f"{rank:>5}" for rank in ranks)
    for depth, (rounds, shares) in enumerate(zip(tuning.rounds, tuning.acceptance, strict=True), 1):
        yield f"{depth:>5}  {rounds:>6}  " + "  ".join(f"{share:5.3f}" for share in shares)
    yield ""
    yield TABLE_HEAD
    yield from map(tuning.describe_candidate, tuning.candidates)


def format_result(tuning: DraftTuning, result: TuningResult) -> Iterator[str]:
    """Yield lines on the candidates of the highest predicted speed-ups and all measured ones."""
    yield ""
    yield (
        f"{tuning.name}, batch {result.batch}, context {result.context}: without a draft, the "
        f"target takes {1e3 * result.token_s:.2f} ms per token"
    )
    yield f"{TABLE_HEAD}{'cost':>7}{'predicted':>10}  measured"
    ranked = sorted(
        tuning.candidates, key=lambda candidate: -tuning.predicted_speedup(result, candidate)
    )
    for rank, candidate in enumerate(ranked):
        if rank < MAX_SHOWN_CANDIDATES or candidate.name in result.speedups:
            mark = " " if result.cost_curve.num_timings(candidate) else "~"
            yield (
                f"{tuning.describe_candidate(candidate)}"
                f"{mark}{result.cost_curve.steps(candidate):>6.2f}"
                f"{tuning.predicted_speedup(result, candidate):>10.2f}  "
                f"{result.format_speedup(candidate)}"
            )
    if result.choice:
        yield f"choice: {result.choice.name}{_format_reservation(result, ' ({})')}"
    else:
        yield f"choice: do not speculate ({result.best.name}: {result.verdict.value})"


def _format_reservation(result: TuningResult, template: str) -> str:
    """Return the verdict in the template unless speculation pays for certain."""
    pays = result.verdict is TuningVerdict.pays
    return "" if pays else template.format(result.verdict.value)


def list_results(tunings: list[DraftTuning]) -> list[tuple[DraftTuning, TuningResult]]:
    """Return every result with its draft, by batch and context."""
    rows = [(tuning, result) for tuning in tunings for result in tuning.results]
    return sorted(rows, key=lambda row: (row[1].batch, row[1].context))


def format_summary(tunings: list[DraftTuning], run: Path, conf: TuneConf) -> Iterator[str]:
    """Yield one line for each result, and the command that decodes with each choice."""
    yield ""
    yield "cost: autoregressive steps per round (~ interpolated); speed-up over the target alone"
    yield f"{'batch':>5}{'context':>9}  {'draft':<20}{'choice':<16}{'predicted':>9}  measured"
    rows = list_results(tunings)
    for tuning, result in rows:
        yield (
            f"{result.batch:>5}{result.context:>9}  {tuning.name:<20}{result.choice_name:<16}"
            f"{tuning.predicted_speedup(result, result.best):>9.2f}  "
            f"{result.format_speedup(result.best)}{_format_reservation(result, '  {}')}"
        )
    for tuning, result in rows:
        if result.choice:
            note = "  # its mode ngram; no draft is needed" if result.choice.is_lookup else ""
            yield tuning.eval_command(_tree_file(run, tuning, result), result.batch, conf) + note
    yield f"all figures: {run / 'tune.json'}"


def collect_results(tunings: list[DraftTuning]) -> TrackedResults:
    """Return a row for each result, as the summary on the terminal has it, and the choices."""
    rows = list_results(tunings)
    return TrackedResults(
        prefix="tune_report",
        figures={
            f"{tuning.name}/batch {result.batch}, context {result.context}": result.choice_name
            for tuning, result in rows
        },
        columns=["batch", "context", "draft", "choice", "predicted", "measured", "verdict"],
        rows=[
            [
                str(result.batch), str(result.context), tuning.name, result.choice_name,
                f"{tuning.predicted_speedup(result, result.best):.2f}",
                result.format_speedup(result.best), result.verdict.value,
            ]
            for tuning, result in rows
        ],
    )  # fmt: skip


def _tree_file(run: Path, tuning: DraftTuning, result: TuningResult) -> Path:
    return run / f"{tuning.name.replace('/', '-')}-b{result.batch}-c{result.context}.json"


def write_tree_files(tunings: list[DraftTuning], run: Path) -> None:
    """Write a tree file for each choice, with its figures and what it was tuned for."""
    for tuning, result in list_results(tunings):
        if (choice := result.choice) is not None:
            content = {
                **choice.to_file(),
                **_candidate_to_dict(tuning, result, choice),
                "mode": "ngram" if choice.is_lookup else "tree",
                "verdict": result.verdict.value,
                "checkpoint": str(tuning.directory),
                "batch": result.batch,
                "context": result.context,
            }
            _tree_file(run, tuning, result).write_text(json.dumps(content) + "\n")


def write_best_trees(tunings: list[DraftTuning], run: Path, conf: TuneConf) -> list[str]:
    """Write the static tree that is accepted most for each node budget; return their commands."""
    commands = []
    for tuning in tunings:
        for candidate in (c for c in tuning.candidates if c.family == "static"):
            file = run / f"{tuning.name.replace('/', '-')}-{candidate.name}.json"
            expected = asdict(tuning.expected_tokens[candidate.name])
            content = {**candidate.to_file(), **expected, "checkpoint": str(tuning.directory)}
            file.write_text(json.dumps(content) + "\n")
            commands.append(tuning.eval_command(file, 1, conf))
    return commands


def build_tuning_report(
    tunings: list[DraftTuning], target: Target, device: dict[str, Any], prompts: list[EvalPrompt]
) -> dict[str, Any]:
    """Return all predictions and measurements, for tune.json."""
    return {
        "target": target.name,
        "device": device,
        "prompts": {"count": len(prompts), "sha256": fingerprint_prompts(prompts)},
        "drafts": [
            {
                "name": tuning.name,
                "checkpoint": str(tuning.directory),
                "acceptance": tuning.acceptance.tolist(),
                "rounds": tuning.rounds,
                "expected_tokens": {
                    name: asdict(tokens) for name, tokens in tuning.expected_tokens.items()
                },
                "results": [
                    {
                        "batch": result.batch,
                        "context": result.context,
                        "token_s": result.token_s,
                        "choice": result.choice and result.choice.name,
                        "best": result.best.name,
                        "verdict": result.verdict.value,
                        "candidates": [
                            _candidate_to_dict(tuning, result, candidate)
                            for candidate in tuning.candidates
                        ],
                    }
                    for result in tuning.results
                ],
            }
            for tuning in tunings
        ],
    }


def _candidate_to_dict(
    tuning: DraftTuning, result: TuningResult, candidate: TreeCandidate
) -> dict[str, Any]:
    """Return the report of a candidate; `best_over_it` is the best one's speed over its own."""
    measured = result.speedups.get(candidate.name)
    best_over_it = result.best_over_each.get(candidate.name)
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
