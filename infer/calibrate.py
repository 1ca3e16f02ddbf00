"""Search the static tree that a draft deserves, from how often each of its candidates was right.

python -m infer.calibrate                   the newest finished training run
python -m infer.calibrate checkpoint=DIR nodes=24 depth=4
python -m infer.eval tree=static tree.file=outputs/infer.calibrate/calibrate/tree.json

Measured while decoding, on prompts that are not the held-out ones (`infer/measure/acceptance.py`).

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
from data.eval_prompts.prompts import EvalPrompt, fingerprint
from data.mixture.held_out_rows import SELECTION
from infer.checkpoints import opened, own_target
from infer.config import CalibrateConf
from infer.engine.decode import Decoder, Watch
from infer.measure.acceptance import Tally, comb, expected_length
from infer.measure.intervals import Estimate, bootstrap_t
from infer.measure.prompt_choice import calibration_prompts, own_prompts
from infer.report.number_format import estimate, number
from models.checkpoint import output_file
from models.drafts import load_draft
from models.drafts.base import Draft
from models.errors import UserError
from models.speculate.sampling import SamplingConf
from models.speculate.tree import Tree, TreeConf, TreeKind, best_first, static_tree
from models.speculate.tree_formats import write_paths
from models.target.target import Target

BATCH = 8  # prompts decoded at once; every row is as if it were alone


@dataclass(kw_only=True)
class Tried:
    """A tree, and the tokens a round that the table promises of it and that it came to."""

    shape: Tree
    expected: float | None  # None: the table does not cover it
    measured: Estimate | None  # None: deeper than the draft can propose


@dataclass(kw_only=True)
class Calibration:
    """`acceptance[d, r]`: the target's token is candidate r of depth d, the likeliest path so far.

    `rounds[d]` is of how many rounds that is said.
    """

    acceptance: Float[ndarray, "depth ranks"]
    rounds: Float[ndarray, " depth"]
    paths: list[list[int]]
    trees: dict[str, Tried]


def calibrate(
    target: Target, draft: Draft, prompts: list[EvalPrompt], conf: CalibrateConf
) -> Calibration:
    """Tally a comb, search, and decode with what was found, beside a chain and `conf.tree`."""
    if conf.depth > draft.max_depth:
        raise UserError(
            f"depth: must be at most the {draft.max_depth} tokens that the draft can propose, "
            f"got {conf.depth}; lower depth"
        )
    tally = Tally(conf.depth, conf.ranks)
    eager = target.eager()  # compiling takes longer than the few rounds of each tree
    slots = max(len(prompt.ids) for prompt in prompts) + conf.max_new_tokens

    def measured(name: str, shape: Tree, watch: Watch | None = None) -> Estimate | None:
        if shape.depth > draft.max_depth:
            return None
        decoder = Decoder(eager, draft, shape, sampling=SamplingConf(), slots=slots, batch=BATCH)
        return acceptance_length(name, decoder, prompts, conf.max_new_tokens, watch)

    measured("comb", static_tree(comb(conf.depth, conf.ranks)), tally)
    acceptance = tally.acceptance()
    paths = best_first(acceptance, conf.nodes)
    trees = {
        "found": static_tree(paths),
        "chain": TreeConf(kind=TreeKind.chain, depth=conf.depth).build(),
        f"tree={conf.tree.kind.value}": conf.tree.build(),
    }
    return Calibration(
        acceptance=acceptance, rounds=tally.rounds.numpy(), paths=paths,
        trees={
            name: Tried(
                shape=shape, expected=expected_length(acceptance, shape),
                measured=measured(name, shape),
            )
            for name, shape in trees.items()
        },
    )  # fmt: skip


def acceptance_length(
    name: str, decoder: Decoder, prompts: list[EvalPrompt], max_new_tokens: int,
    watch: Watch | None = None,
) -> Estimate | None:  # fmt: skip
    """Tokens a round, with its interval over prompts; None where no round was needed."""
    sums = []
    starts = range(0, len(prompts), decoder.batch)
    for start in track(starts, name, disable=not sys.stderr.isatty()):
        some = prompts[start : start + decoder.batch]
        done = decoder.decode(
            [prompt.ids for prompt in some], row_ids=[prompt.row_id for prompt in some],
            max_new_tokens=max_new_tokens, eos_ids=decoder.target.eos_ids, watch=watch,
        )  # fmt: skip
        sums += [[sum(row.accepted) + len(row.accepted), len(row.accepted)] for row in done]
    return bootstrap_t(np.array(sums, dtype=np.float64), support=(1.0, np.inf))


def check(conf: CalibrateConf) -> None:
    """Refuse what can be known to be wrong before a model is loaded."""
    conf.tree.build()
    if conf.prompts is not None:
        prompt_files.read(conf.prompts, key="prompts")
    with output_file(conf.output) as file:
        tempfile.TemporaryFile(dir=file.parent).close()


def lines(found: Calibration) -> Iterator[str]:
    """What the terminal shows."""
    ranks = range(found.acceptance.shape[1])
    yield "share of rounds in which the target's token is candidate 0, 1, ... of the draft,"
    yield "among those in which candidate 0 was right at every depth before"
    yield "depth  rounds  " + "  ".join(f"{rank:>5}" for rank in ranks)
    rows = zip(found.rounds, found.acceptance, strict=True)
    for depth, (rounds, shares) in enumerate(rows, 1):
        cells = "  ".join(f"{share:5.3f}" for share in shares)
        yield f"{depth:>5}  {int(rounds):>6}  {cells}"
    yield ""
    yield f"{'tree':<14}{'nodes':>5}{'depth':>7}{'expected':>10}  measured tokens a round"
    for name, tried in found.trees.items():
        measured = estimate(tried.measured and asdict(tried.measured))
        shape = tried.shape
        sizes = f"{name:<14}{shape.size:>5}{shape.deepest:>7}"
        yield f"{sizes}{number(tried.expected):>10}  {measured}"


def about(
    found: Calibration, directory: Path, target: Target, prompts: list[EvalPrompt]
) -> dict[str, Any]:
    """What a tree file carries beside its paths: what it was made from, and what was measured."""
    return {
        "expected": {name: tried.expected for name, tried in found.trees.items()},
        "measured": {
            name: tried.measured and asdict(tried.measured) for name, tried in found.trees.items()
        },
        "acceptance": found.acceptance.tolist(),
        "rounds": found.rounds.tolist(),
        "checkpoint": str(directory),
        "target": target.name,
        "prompts": {"count": len(prompts), "sha256": fingerprint(prompts)},
    }


@entry_point("calibrate", CalibrateConf)
def main(conf: CalibrateConf) -> None:
    say = Console(soft_wrap=True, highlight=False).print
    (directory,) = opened([conf.checkpoint] if conf.checkpoint else None, say)
    check(conf)
    asked = own_target(conf.target, [directory])
    chosen = conf.prompts or own_prompts([directory], asked, SELECTION, key="prompts")
    target = asked.build(conf.device.build())
    _, draft = load_draft(directory, target)
    target = draft.verifier(target) or target
    prompts = calibration_prompts(target, chosen, conf.num_prompts)
    with target.device.shared_if_worth(target.parameters // target.num_layers):
        found = calibrate(target, draft, prompts, conf)
    for line in lines(found):
        say(line)
    with output_file(conf.output) as file:
        write_paths(found.paths, file, about=about(found, directory, target, prompts))
    say(f"\n{len(prompts)} prompts, the same for table and trees; on held-out ones:")
    say(f"python -m infer.eval checkpoint={directory} tree=static tree.file={file}")


if __name__ == "__main__":
    main()
