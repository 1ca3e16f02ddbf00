"""Choose the tree or window that this device, this draft and this traffic want.

python -m infer.tune checkpoint=DIR
python -m infer.tune checkpoint=[A,B] batch=[1,8] context=[1024,8192] prompts=mine.jsonl

Tokens a round come from replay (`infer/measure/replay.py`), what a round costs from timing a few
shapes (`infer/tuning/cost_model.py`). The likeliest best shape is timed itself until no other
promises more; then it is decoded with, beside its neighbours and the target alone. How far to trust
it: docs/tuning.md.
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
from data.mixture.held_out_rows import SELECTION
from infer.checkpoints import make_writable, names, opened, own_target
from infer.measure.intervals import Estimate, bootstrap_t
from infer.measure.prompt_choice import calibration_prompts, own_prompts
from infer.measure.replay import Replay, Text, all_positions, jumps, on_policy, texts
from infer.tuning.candidates import GIVEN, Shape, neighbours, shapes, with_copied
from infer.tuning.config import TuneConf
from infer.tuning.cost_model import AUTOREGRESSIVE, Bench, choose, probes
from infer.tuning.output import cell_lines, content, summary, write_trees
from infer.tuning.results import Cell, Tuned, Worth
from models import checkpoint
from models.drafts import load_draft
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.errors import UserError
from models.speculate.tree import TreeConf, TreeKind
from models.target.target import Target

Accepted = list[ndarray]  # of each text: what a round from each start accepts


def worth_of(
    target: Target, draft: Draft, found: list[Shape], read: list[Text], conf: TuneConf
) -> dict[str, Worth]:
    """By replay: one chain tells of all windows, and copied tokens are worth the longer of both."""
    plain = [one for one in found if not one.conf.copied]
    trees = {one.name: one.tree for one in plain}
    windows = [one for one in plain if one.conf.kind is TreeKind.chain]
    longest = max(windows, key=lambda one: one.size)
    asked = {name: tree for name, tree in trees.items() if tree.kind is not TreeKind.chain}
    replay = Replay(target, draft, read, sampling=conf.sampling)
    accepted = replay.accepted(asked | {longest.name: longest.tree})
    whole = accepted[longest.name]
    accepted |= {one.name: [np.minimum(part, one.size) for part in whole] for one in windows}
    if conf.copied:
        chain = TreeConf(kind=TreeKind.chain, depth=conf.copied).build()
        lookup = Replay(target, NgramDraft(), read, sampling=conf.sampling)
        (copies,) = lookup.accepted({"lookup": chain}).values()
        accepted |= {
            with_copied(one, conf.copied).name: list(map(np.maximum, accepted[one.name], copies))
            for one in plain
        }
    return {one.name: _worth(accepted[one.name], read) for one in found}


def _worth(accepted: Accepted, read: list[Text]) -> Worth:
    rounds = sum(len(jumps(one)) for one in accepted)
    tau, anywhere = (sums.sum(0) for sums in (on_policy(accepted), all_positions(accepted)))
    return Worth(
        kept=sum(text.starts for text in read) / max(rounds, 1),
        tau=tau[0] / max(tau[1], 1),
        all_positions=anywhere[0] / max(anywhere[1], 1),
    )  # fmt: skip


def settle(bench: Bench, tuned: Tuned, conf: TuneConf) -> Cell:
    """Choose, then decode with the choice, its neighbours and, for a sweep, many others."""
    found = tuned.shapes
    others = swept(found) if conf.sweep else []
    for one in [None, *dict.fromkeys(probes(found) + others)]:
        bench.decoder(one)
    kept = {name: worth.kept for name, worth in tuned.worth.items()}
    curve, best = choose(bench.steps, found, kept)
    for one in neighbours(best, found):
        curve.add(one, bench.steps(one))
    raced = list(dict.fromkeys([best, *neighbours(best, found), *others]))
    sums = bench.race(raced, conf.repeats)
    plain = sums[AUTOREGRESSIVE]
    for one in neighbours(best, found):
        ratio = faster(sums[one.name], sums[best.name])
        if ratio and ratio.ci95 and ratio.ci95[0] > 1:
            best = one
    speedups = {one.name: faster(sums[one.name], plain) for one in raced}
    measured = speedups[best.name]
    return Cell(
        draft=tuned.name, batch=bench.batch, context=bench.context, curve=curve, best=best,
        token_s=float(plain[:, 1].sum() / plain[:, 0].sum()), speedups=speedups,
        pick=best if measured and measured.mean > 1 else None,
        of_best={one.name: faster(sums[best.name], sums[one.name]) for one in raced},
    )  # fmt: skip


def faster(ours: ndarray, theirs: ndarray) -> Estimate | None:
    """Tokens a second over theirs, paired by prompt."""
    rows = np.concatenate([ours, theirs], 1)
    return bootstrap_t(rows, lambda m: m[..., 0] / m[..., 1] * m[..., 3] / m[..., 2])


def swept(found: list[Shape]) -> list[Shape]:
    """Every window, the tree that was given, and trees of four budgets in three kinds."""
    sizes = sorted({one.size for one in found if one.family == "static"})
    kinds = [f for f in {one.family for one in found} if f.partition("+")[0] == "dynamic"]
    trees = [one for one in found if one.family in ("static", *kinds)]
    some = [one for one in trees if one.size in sizes[1:3] + sizes[-2:]]
    return [one for one in found if one.family in ("chain", GIVEN)] + some


def tune(
    target: Target, drafts: dict[str, tuple[Path, Draft]], prompts: list[EvalPrompt],
    conf: TuneConf, say: Callable[[str], None],
) -> list[Tuned]:  # fmt: skip
    """One answer for each draft, batch and context."""
    found = []
    for name, (directory, draft) in drafts.items():
        own = draft.verifier(target) or target
        depth = min(conf.depth, draft.max_depth)
        say(f"{name}: the target's answers to {len(prompts)} prompts, replayed")
        read = texts(
            own, prompts, sampling=conf.sampling, max_new_tokens=conf.max_new_tokens,
            layers=draft.needs.layers, ahead=max(depth, conf.copied, conf.tree.build().deepest),
        )  # fmt: skip
        if not any(text.starts for text in read):
            raise UserError(
                "prompts: must have answers of more than one token, got none; choose others"
            )
        table = Replay(own, draft, read, sampling=conf.sampling).table(depth, conf.ranks)
        considered = shapes(
            table.acceptance(), nodes=conf.nodes, copied=conf.copied, given=conf.tree
        )
        worth = worth_of(own, draft, considered, read, conf)
        tuned = Tuned(
            name=name, directory=directory, shapes=considered, worth=worth,
            acceptance=table.acceptance(),
        )  # fmt: skip
        room = max(len(prompt.ids) for prompt in prompts) + conf.max_new_tokens
        for batch in conf.batch:
            for context in conf.context or [room]:
                bench = Bench(
                    target=own, draft=draft, prompts=prompts, sampling=conf.sampling, batch=batch,
                    context=context, max_new_tokens=conf.max_new_tokens, say=say,
                )  # fmt: skip
                tuned.cells.append(settle(bench, tuned, conf))
                torch.compiler.reset()  # other shapes follow: graphs of these are in their way
                for line in cell_lines(tuned, tuned.cells[-1]):
                    say(line)
        found.append(tuned)
    return found


def check(conf: TuneConf) -> None:
    """Refuse what can be known to be wrong before a model is loaded."""
    conf.tree.build()
    if conf.prompts is not None:
        prompt_files.read(conf.prompts, key="prompts")


def check_room(conf: TuneConf, prompts: list[EvalPrompt]) -> None:
    """Refuse a context that an answer does not fit in, before anything is replayed."""
    longest = max(len(prompt.ids) for prompt in prompts)
    for context in conf.context or []:
        if context < longest + conf.max_new_tokens:
            raise UserError(
                f"context: must hold prompt and answer, {longest} + {conf.max_new_tokens} tokens, "
                f"got {context}; raise it or shorten max_new_tokens"
            )


@entry_point("tune", TuneConf)
def main(conf: TuneConf) -> None:
    say = Console(soft_wrap=True, highlight=False).print
    directories = opened(conf.checkpoint, say)
    run = Path(conf.output_dir) / conf.run_name
    check(conf)
    make_writable(run)
    asked = own_target(conf.target, directories)
    chosen = conf.prompts or own_prompts(directories, asked, SELECTION, key="prompts")
    target = asked.build(conf.device.build())
    prompts = calibration_prompts(target, chosen, conf.num_prompts)
    check_room(conf, prompts)
    with target.device.shared_if_worth(target.parameters // target.num_layers):
        drafts = {
            name: (directory, load_draft(directory, target)[1])
            for name, directory in zip(names(directories), directories, strict=True)
        }
        found = tune(target, drafts, prompts, conf, say)
        device = target.device.describe()
    with checkpoint.writing(run):
        (run / "tune.json").write_text(json.dumps(content(found, target, device, prompts)) + "\n")
        write_trees(found, run, conf)
    for line in summary(found, run, conf):
        say(line)


if __name__ == "__main__":
    main()
