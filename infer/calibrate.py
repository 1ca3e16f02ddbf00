"""Search the best static tree for a draft, from how often each of its candidates is accepted.

python -m infer.calibrate                   the newest finished training run
python -m infer.calibrate checkpoint=DIR nodes=24 depth=4
python -m infer.eval tree=static tree.file=outputs/infer.calibrate/calibrate/tree.json

Acceptance is measured while decoding (`infer/measure/acceptance.py`), on prompts other than the
held-out ones.

Axes: D depth, R ranks.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from rich.console import Console
from rich.progress import track

from conf.entry import entry_point
from data.eval_prompts import prompts as prompt_files
from data.eval_prompts.prompts import EvalPrompt, fingerprint_prompts
from data.mixture.held_out_rows import SELECTION_FILE
from infer.checkpoints import open_checkpoints, resolve_target
from infer.config import CalibrateConf
from infer.engine.decode import Decoder, RoundCallback
from infer.measure.acceptance import AcceptanceCounter, build_comb, expected_length
from infer.measure.intervals import Estimate, bootstrap_t
from infer.measure.prompt_choice import find_held_out_file, load_calibration_prompts
from infer.report.number_format import format_estimate, format_number
from models.drafts import load_draft
from models.drafts.base import Draft, SpeculativePair
from models.errors import UserError
from models.files import open_output_file
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Tree, TreeConf, TreeKind, best_first_paths, tree_from_paths
from models.speculate.tree_formats import write_paths
from models.target.target import Target

BATCH = 8  # prompts decoded at once; rows do not affect each other


@dataclass(kw_only=True)
class TreeTrial:
    """A tree, with its expected and its measured tokens a round."""

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
    """Measure acceptance on a comb, search a tree, and compare it with a chain and `conf.tree`."""
    if conf.depth > draft.max_depth:
        raise UserError(
            f"depth: must be at most the {draft.max_depth} tokens that the draft can propose, "
            f"got {conf.depth}; lower depth"
        )
    counter = AcceptanceCounter(conf.depth, conf.ranks)
    eager = target.eager()  # compiling takes longer than the few rounds of each tree
    slots = max(len(prompt.ids) for prompt in prompts) + conf.max_new_tokens

    def measure(name: str, tree: Tree, on_round: RoundCallback | None = None) -> Estimate | None:
        if tree.depth > draft.max_depth:
            return None
        decoder = Decoder(eager, draft, tree, sampling=SamplingConf(), slots=slots, batch=BATCH)
        return measure_acceptance_length(name, decoder, prompts, conf.max_new_tokens, on_round)

    measure("comb", tree_from_paths(build_comb(conf.depth, conf.ranks)), counter)
    acceptance = counter.acceptance()
    paths = best_first_paths(acceptance, conf.nodes)
    trees = {
        "found": tree_from_paths(paths),
        "chain": TreeConf(kind=TreeKind.chain, depth=conf.depth).build(),
        f"tree={conf.tree.kind.value}": conf.tree.build(),
    }
    return Calibration(
        acceptance=acceptance, rounds=counter.rounds.numpy(), paths=paths,
        trees={
            name: TreeTrial(
                tree=tree, expected=expected_length(acceptance, tree), measured=measure(name, tree)
            )
            for name, tree in trees.items()
        },
    )  # fmt: skip


def measure_acceptance_length(
    name: str, decoder: Decoder, prompts: list[EvalPrompt], max_new_tokens: int,
    on_round: RoundCallback | None = None,
) -> Estimate | None:  # fmt: skip
    """Return tokens a round with the interval over prompts; None if no prompt needed a round."""
    sums = []
    starts = range(0, len(prompts), decoder.batch)
    for start in track(starts, name, disable=not sys.stderr.isatty()):
        batch = prompts[start : start + decoder.batch]
        generations = decoder.decode(
            [prompt.ids for prompt in batch], row_ids=[prompt.row_id for prompt in batch],
            max_new_tokens=max_new_tokens, eos_ids=decoder.target.eos_ids, on_round=on_round,
        )  # fmt: skip
        sums += [[sum(row.accepted) + len(row.accepted), len(row.accepted)] for row in generations]
    return bootstrap_t(np.array(sums, dtype=np.float64), support=(1.0, np.inf))


def check_calibrate_config(conf: CalibrateConf) -> None:
    """Check what can be checked before a model is loaded; raise UserError otherwise."""
    conf.tree.build()
    if conf.prompts is not None:
        prompt_files.read_prompt_rows(conf.prompts, key="prompts")
    with open_output_file(conf.output) as file:
        tempfile.TemporaryFile(dir=file.parent).close()


def format_calibration(calibration: Calibration) -> Iterator[str]:
    """Yield the lines for the terminal."""
    ranks = range(calibration.acceptance.shape[1])
    yield "share of rounds in which the target's token is candidate 0, 1, ... of the draft,"
    yield "among those in which candidate 0 was right at every depth before"
    yield "depth  rounds  " + "  ".join(f"{rank:>5}" for rank in ranks)
    rows = zip(calibration.rounds, calibration.acceptance, strict=True)
    for depth, (rounds, shares) in enumerate(rows, 1):
        cells = "  ".join(f"{share:5.3f}" for share in shares)
        yield f"{depth:>5}  {int(rounds):>6}  {cells}"
    yield ""
    yield f"{'tree':<14}{'nodes':>5}{'depth':>7}{'expected':>10}  measured tokens a round"
    for name, trial in calibration.trees.items():
        measured = format_estimate(trial.measured and asdict(trial.measured))
        tree = trial.tree
        sizes = f"{name:<14}{tree.size:>5}{tree.max_path_length:>7}"
        yield f"{sizes}{format_number(trial.expected):>10}  {measured}"


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


@entry_point("calibrate", CalibrateConf)
def main(conf: CalibrateConf) -> None:
    print_line = Console(soft_wrap=True, highlight=False).print
    (directory,) = open_checkpoints([conf.checkpoint] if conf.checkpoint else None, print_line)
    check_calibrate_config(conf)
    target_conf = resolve_target(conf.target, [directory])
    prompt_path = conf.prompts or find_held_out_file(
        [directory], target_conf, SELECTION_FILE, key="prompts"
    )
    target = target_conf.build(conf.device.build())
    _, draft = load_draft(directory, target)
    target = SpeculativePair(target=target, draft=draft).verifying_target
    prompts = load_calibration_prompts(target, prompt_path, conf.num_prompts)
    with target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        calibration = calibrate_tree(target, draft, prompts, conf)
    for line in format_calibration(calibration):
        print_line(line)
    with open_output_file(conf.output) as file:
        write_paths(
            calibration.paths, file,
            metadata=describe_calibration(calibration, directory, target, prompts),
        )  # fmt: skip
    print_line(f"\n{len(prompts)} prompts, the same for table and trees; on held-out prompts run:")
    print_line(f"python -m infer.eval checkpoint={directory} tree=static tree.file={file}")


if __name__ == "__main__":
    main()
