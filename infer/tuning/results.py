"""Results of tuning: the choice for each setting, printed as lines and written as files."""

import json
import re
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from conf.typed_text import format_overrides
from data.eval_prompts.prompts import EvalPrompt, fingerprint_prompts
from infer.report.number_format import format_estimate
from infer.results.intervals import Estimate
from infer.tuning.candidates import TreeCandidate
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import CostCurve
from models.io.console import print_line, print_table
from models.io.tracking import TrackedResults
from models.targets.target import Target

SHAPE_COLUMNS = ["shape", "nodes", "depth", "tau"]
SUMMARY_COLUMNS = ["batch", "context", "draft", "choice", "predicted", "measured", "verdict"]
MAX_SHOWN_CANDIDATES = 8  # candidates of each result in the terminal; tune.json has all


@dataclass(kw_only=True)
class ExpectedTokens:
    """The tokens per round of a candidate, estimated by replay."""

    delivered: float  # per round, without the tokens after the answer's end
    tau: float  # acceptance length


class TuningVerdict(Enum):
    """The comparison of the best candidate with no speculation, by its speed-up's interval."""

    pays = "pays"
    open = "not told apart from not speculating"
    loses = "does not pay"
    unmeasured = "was not measured: no answer took a round"

    @classmethod
    def from_speedup(cls, speedup: Estimate | None) -> "TuningVerdict":
        if speedup is None:
            return cls.unmeasured
        low, high = speedup.ci95 or (-np.inf, np.inf)
        return cls.pays if low > 1 else cls.loses if high < 1 else cls.open


@dataclass(kw_only=True)
class TuningResult:
    """The result for one draft, batch size and context."""

    batch: int
    context: int
    candidates: list[TreeCandidate]  # whose cost is known: fewer than the draft's where some did not compile in time
    token_s: float  # seconds per token of the target alone; rows in a batch share a step's time
    cost_curve: CostCurve
    num_prompts: int  # that were measured
    best: TreeCandidate  # the best candidate, even if it is slower than no speculation
    speedups: dict[str, Estimate | None]  # of the measured candidates, over no speculation
    best_over_each: dict[str, Estimate | None]  # speed of `best` over theirs, paired by prompt

    @property
    def verdict(self) -> TuningVerdict:
        return TuningVerdict.from_speedup(self.speedups[self.best.name])

    @property
    def choice(self) -> TreeCandidate | None:
        """Return the faster point estimate: `best`, or None for no speculation."""
        speedup = self.speedups[self.best.name]
        return self.best if speedup and speedup.mean > 1 else None

    def format_speedup(self, candidate: TreeCandidate) -> str:
        """Format the measured speed-up of a candidate, or a dash if it was not measured."""
        return format_estimate(self.speedups.get(candidate.name))


@dataclass(kw_only=True)
class DraftTuning:
    """One draft's candidates with their expected tokens, and a result for each batch and context.

    Expected tokens do not depend on batch and context. `acceptance[d, r]` is the share of rounds in which the target's
    token is candidate r at depth d, among the `rounds[d]` rounds in which candidate 0 was right at every depth before.
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

    def write_tree(self, run: Path, suffix: str, candidate: TreeCandidate, facts: dict[str, Any]) -> Path:
        """Write a tree file with `facts` about the candidate; return its path."""
        file = self.tree_path(run, suffix)
        content = {**candidate.to_file(), **facts, "checkpoint": str(self.directory)}
        file.write_text(json.dumps(content) + "\n")
        return file

    def remove_trees(self, run: Path) -> None:
        """Remove the tree files of an earlier tuning in the folder `run`."""
        name = re.escape(self.tree_path(run, "").stem)  # a draft's name may begin with this one
        for file in run.glob("*.json"):
            if re.fullmatch(rf"{name}(b\d+-c\d+|static.*)\.json", file.name):
                file.unlink()

    def tree_path(self, run: Path, suffix: str) -> Path:
        return run / f"{self.name.replace('/', '-')}-{suffix}.json"

    def format_command(self, file: Path, eval_overrides: str) -> str:
        """Return the command that measures a draft with the tree of a file."""
        overrides = format_overrides({"checkpoint": self.directory, "tree.file": file})
        return f"python -m infer.eval {overrides} {eval_overrides}".rstrip()


def print_acceptance(tuning: DraftTuning) -> None:
    """Print the table of acceptance, and the tokens per round of each candidate."""
    print_line(
        "share of rounds in which the target's token is candidate 0, 1, ... of the draft,\n"
        "among those in which candidate 0 was right at every depth before"
    )
    shares = enumerate(zip(tuning.rounds, tuning.acceptance, strict=True), start=1)
    print_table(
        ["depth", "rounds", *map(str, range(tuning.acceptance.shape[1]))],
        [[str(depth), str(rounds), *map("{:.3f}".format, row)] for depth, (rounds, row) in shares],
    )
    print_line()
    print_table(SHAPE_COLUMNS, [_shape_cells(tuning, candidate) for candidate in tuning.candidates])


def _shape_cells(tuning: DraftTuning, candidate: TreeCandidate) -> list[str]:
    tree, tokens = candidate.tree, tuning.expected_tokens[candidate.name]
    return [candidate.name, str(tree.size), str(tree.max_path_length), f"{tokens.tau:.2f}"]


def print_result(tuning: DraftTuning, result: TuningResult) -> None:
    """Print the candidates of the highest predicted speed-ups, all measured ones and the choice."""
    print_line(
        f"\n{tuning.name}, batch {result.batch}, context {result.context}: without a draft, the "
        f"target takes {1e3 * result.token_s:.2f} ms per token"
    )
    ranked = sorted(result.candidates, key=lambda shape: -tuning.predicted_speedup(result, shape))
    rows = [
        [
            *_shape_cells(tuning, candidate),
            f"{'' if result.cost_curve.num_timings(candidate) else '~'}{result.cost_curve.steps(candidate):.2f}",
            f"{tuning.predicted_speedup(result, candidate):.2f}",
            result.format_speedup(candidate),
        ]
        for rank, candidate in enumerate(ranked)
        if rank < MAX_SHOWN_CANDIDATES or candidate.name in result.speedups
    ]
    print_table([*SHAPE_COLUMNS, "cost", "predicted", "measured"], rows)
    choice = result.choice.name if result.choice else f"do not speculate; {result.best.name}"
    print_line(f"choice: {choice} ({result.verdict.value})")


def list_results(tunings: list[DraftTuning]) -> list[tuple[DraftTuning, TuningResult]]:
    """Return every result with its draft, by batch and context."""
    rows = [(tuning, result) for tuning in tunings for result in tuning.results]
    return sorted(rows, key=lambda row: (row[1].batch, row[1].context))


def build_summary(tunings: list[DraftTuning]) -> list[list[str]]:
    """Return a row of SUMMARY_COLUMNS for each result."""
    return [
        [
            str(result.batch),
            str(result.context),
            tuning.name,
            result.choice.name if result.choice else "none",
            f"{tuning.predicted_speedup(result, result.best):.2f}",
            result.format_speedup(result.best),
            result.verdict.value,
        ]
        for tuning, result in list_results(tunings)
    ]


def collect_results(tunings: list[DraftTuning]) -> TrackedResults:
    """Return the summary and the choices for W&B."""
    rows = build_summary(tunings)
    return TrackedResults(
        prefix="tune_report",
        figures={f"{draft}/batch {batch}, context {context}": choice for batch, context, draft, choice, *_ in rows},
        columns=SUMMARY_COLUMNS,
        rows=rows,
    )


def write_choices(tunings: list[DraftTuning], run: Path, conf: TuneConf) -> list[str]:
    """Write a tree file of figures for each choice; return the commands that decode with them."""
    commands = []
    for tuning, result in list_results(tunings):
        if (choice := result.choice) is None:
            continue
        facts = {
            **_candidate_to_dict(tuning, result, choice),
            "verdict": result.verdict.value,
            "batch": result.batch,
            "context": result.context,
        }
        suffix = f"b{result.batch}-c{result.context}"
        # Reports measure the lookup with one row alone, and batches of the draft's tree.
        overrides = conf.eval_overrides(1 if choice.is_lookup else result.batch)
        note = "  # its mode ngram, of one row; no draft is needed" if choice.is_lookup else ""
        commands.append(tuning.format_command(tuning.write_tree(run, suffix, choice, facts), overrides) + note)
    return commands


def write_best_trees(tunings: list[DraftTuning], run: Path, conf: TuneConf) -> list[str]:
    """Write the static tree that is accepted most for each node budget; return their commands."""
    commands = []
    for tuning in tunings:
        for candidate in (c for c in tuning.candidates if c.family == "static"):
            expected = asdict(tuning.expected_tokens[candidate.name])
            file = tuning.write_tree(run, candidate.name, candidate, expected)
            commands.append(tuning.format_command(file, conf.eval_overrides(1)))
    return commands


def build_tuning_report(tunings: list[DraftTuning], target: Target, prompts: list[EvalPrompt]) -> dict[str, Any]:
    """Return all predictions and measurements, for tune.json."""
    return {
        "target": target.name,
        "device": target.device.describe(),
        "prompts": {"count": len(prompts), "sha256": fingerprint_prompts(prompts)},
        "drafts": [
            {
                "name": tuning.name,
                "checkpoint": str(tuning.directory),
                "acceptance": tuning.acceptance.tolist(),
                "rounds": tuning.rounds,
                "expected_tokens": {name: asdict(tokens) for name, tokens in tuning.expected_tokens.items()},
                "results": [
                    {
                        "batch": result.batch,
                        "context": result.context,
                        "token_s": result.token_s,
                        "choice": result.choice and result.choice.name,
                        "best": result.best.name,
                        "verdict": result.verdict.value,
                        "candidates": [
                            _candidate_to_dict(tuning, result, candidate) for candidate in result.candidates
                        ],
                    }
                    for result in tuning.results
                ],
            }
            for tuning in tunings
        ],
    }


def _candidate_to_dict(tuning: DraftTuning, result: TuningResult, candidate: TreeCandidate) -> dict[str, Any]:
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
