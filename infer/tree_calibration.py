"""Calibrate a tree: measure how often each candidate is accepted, and take the best ones.

Acceptance is measured by replay of the target's answers (`infer/measure/replay.py`), whose rounds
are those of decoding, on prompts other than the held-out ones.

Axes: D depth, R ranks.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from data.eval_prompts.prompts import EvalPrompt, fingerprint_prompts
from infer.command_inputs import load_calibration
from infer.config import CalibrateConf
from infer.measure.acceptance import best_first_paths, expected_length
from infer.measure.intervals import Estimate, bootstrap_t
from infer.measure.replay import Replay, collect_replay_texts, count_on_policy
from infer.report.number_format import format_estimate, format_number
from models.console import print_line
from models.drafts.base import Draft, SpeculativePair
from models.drafts.registry import load_draft
from models.errors import require
from models.files import open_output_file
from models.speculate.config import SamplingConf, TreeConf
from models.speculate.tree import Tree, TreeKind, tree_from_paths
from models.speculate.tree_formats import write_paths
from models.target.target import Target


@dataclass(kw_only=True)
class TreeTrial:
    """A tree, with its expected and its measured tokens per round."""

    tree: Tree
    expected: float | None  # None: the table has no entry for some node
    measured: Estimate | None  # None: deeper than the draft can propose


@dataclass(kw_only=True)
class Calibration:
    """The measured acceptance of a draft's candidates, and the trees chosen from it.

    `acceptance[d, r]` is the share of rounds in which the target's token is candidate r at depth d,
    among the `rounds[d]` rounds in which candidate 0 was right at every depth before.
    """

    acceptance: Float[ndarray, "depth ranks"]
    rounds: Float[ndarray, " depth"]
    paths: list[list[int]]
    trees: dict[str, TreeTrial]


def calibrate_tree(
    target: Target, draft: Draft, prompts: list[EvalPrompt], conf: CalibrateConf
) -> Calibration:
    """Measure acceptance by depth and rank, and search for the tree of most expected tokens.

    Return both, with that tree, a chain and `conf.tree` measured on the same prompts.
    """
    require(
        conf.depth <= draft.max_depth,
        f"depth: must be at most the {draft.max_depth} tokens that the draft can propose, got "
        f"{conf.depth}; lower depth",
    )
    user_tree, sampling = conf.tree.build(), SamplingConf()
    texts = collect_replay_texts(
        target, prompts, sampling=sampling, max_new_tokens=conf.max_new_tokens,
        layers=draft.needs.layers, lookahead=max(conf.depth, user_tree.max_path_length),
    )  # fmt: skip
    replay = Replay(target, draft, texts, sampling=sampling)
    counter = replay.count_acceptance(conf.depth, conf.ranks)
    acceptance = counter.acceptance()
    paths = best_first_paths(acceptance, conf.nodes)
    trees = {
        "found": tree_from_paths(paths),
        "chain": TreeConf(kind=TreeKind.chain, depth=conf.depth).build(),
        f"tree={conf.tree.kind.value}": user_tree,
    }
    accepted = replay.accepted_lengths(
        {name: tree for name, tree in trees.items() if tree.depth <= draft.max_depth}
    )
    measured = {
        name: bootstrap_t(count_on_policy(lengths), support=(1.0, np.inf))
        for name, lengths in accepted.items()
    }
    return Calibration(
        acceptance=acceptance, rounds=counter.rounds.numpy(), paths=paths,
        trees={
            name: TreeTrial(
                tree=tree, expected=expected_length(acceptance, tree), measured=measured.get(name)
            )
            for name, tree in trees.items()
        },
    )  # fmt: skip


def format_calibration(calibration: Calibration) -> Iterator[str]:
    """Yield the lines for the terminal."""
    yield "share of rounds in which the target's token is candidate 0, 1, ... of the draft,"
    yield "among those in which candidate 0 was right at every depth before"
    ranks = range(calibration.acceptance.shape[1])
    yield "depth  rounds  " + "  ".join(f"{rank:>5}" for rank in ranks)
    rows = zip(calibration.rounds, calibration.acceptance, strict=True)
    for depth, (rounds, shares) in enumerate(rows, 1):
        yield f"{depth:>5}  {int(rounds):>6}  " + "  ".join(f"{share:5.3f}" for share in shares)
    yield ""
    yield f"{'tree':<14}{'nodes':>5}{'depth':>7}{'expected':>10}  measured tokens per round"
    for name, trial in calibration.trees.items():
        yield (
            f"{name:<14}{trial.tree.size:>5}{trial.tree.max_path_length:>7}"
            f"{format_number(trial.expected):>10}  "
            f"{format_estimate(trial.measured)}"
        )


def describe_calibration(
    calibration: Calibration, directory: Path, target: Target, prompts: list[EvalPrompt]
) -> dict[str, Any]:
    """Return the metadata of the tree file: the measurements, and what they were taken on."""
    return {
        "expected": {name: trial.expected for name, trial in calibration.trees.items()},
        "measured": {
            name: trial.measured and asdict(trial.measured)
            for name, trial in calibration.trees.items()
        },
        "acceptance": calibration.acceptance.tolist(),
        "rounds": calibration.rounds.tolist(),
        "checkpoint": str(directory),
        "target": target.name,
        "prompts": {"count": len(prompts), "sha256": fingerprint_prompts(prompts)},
    }


def calibrate_checkpoint(conf: CalibrateConf, directory: Path) -> None:
    """Calibrate the draft in `directory`; write the tree file and print the measurements."""
    target, prompts = load_calibration(conf, [directory])
    _, draft = load_draft(directory, target)
    target = SpeculativePair(target=target, draft=draft).verifying_target
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        calibration = calibrate_tree(target, draft, prompts, conf)
    print_line(*format_calibration(calibration), sep="\n")
    with open_output_file(conf.output) as file:
        metadata = describe_calibration(calibration, directory, target, prompts)
        write_paths(calibration.paths, file, metadata=metadata)
    print_line(f"\n{len(prompts)} prompts, the same for table and trees; on held-out prompts run:")
    print_line(f"python -m infer.eval checkpoint={directory} tree=static tree.file={file}")
