"""Compare settings of EAGLE-3 at equal steps and tokens: one change at a time, several seeds.

    python -m scripts.studies.eagle3 --settings base "two norms" --seeds 0 1 2
    python -m scripts.studies.eagle3 --target outputs/wide --steps 400 --table

A run is `python -m train` with the overrides of its setting, `--jobs` runs side by side on one
thread each. Its last weights are replayed on the target's own answers to held-out prompts, those
that the demo's report leaves out, greedy, as a chain of four: that is what decoding accepts, round
by round. Finished runs are not repeated. docs/studies.md has the figures.
"""

import argparse
import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from conf.entry import compose
from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from infer.measure.replay import ReplayText
from models.drafts.registry import load_draft
from models.io.pages import render_markdown_table
from scripts.processes import run_logged, run_side_by_side
from scripts.studies.chain_rounds import (
    acceptance_length,
    collect_texts,
    load_cpu_target,
    name_target,
    render_difference,
    render_shares,
    replay_chains,
    tabulate_rounds,
)
from train.config.run import TrainConf

DEPTH = 4  # of the chain
WITHOUT_NORMS = ["draft.norm_before_residual=false", "draft.norm_before_fc=false"]
BASE = [
    "optim=demo-medusa",
    "loss=lk_hybrid",
    "draft.train_head=true",
    *WITHOUT_NORMS,
    "draft.vocab_size=null",
    "optim.rows_per_step=8",
    "optim.micro_batch_size=8",
    "data.demo.for_any_target=true",
    "data.demo.num_prompts=2048",
    "data.demo.max_new_tokens=80",
    "tree=chain",
    f"tree.depth={DEPTH}",
    "log=console",
    "device=cpu",
    "device.compile=false",
    "device.threads=1",
    "held_out.selection=1",
    "evaluation.prompts_per_category=1",
    "evaluation.max_new_tokens=2",
    "evaluation.batch_sizes=[]",
]
NEURON_NORMS = ["draft.norm_before_residual=true", "draft.norm_before_fc=true"]
THREE_NORMS = [*NEURON_NORMS, "draft.norm_output=true"]
# The optimizer of speculators 0.9: Muon scaled like AdamW, weight decay, linear decay.
PEER_OPTIMIZER = [
    "optim.lr=1e-2",
    "optim.muon_lr=1e-2",
    "optim.muon_scaling=match_rms_adamw",
    "optim.weight_decay=0.1",
    "optim.schedule=wsd",
    "optim.warmup_ratio=0.01",
    "optim.decay_ratio=0.99",
]
PEER_LOSS = ["loss=forward_kl", "loss.step_decay=1.0", "loss.reduction=token"]
PEER_DRAFT = ["draft.train_head=false", "draft.ttt_steps=3", "draft.intermediate_size=256"]
# The same without `norm_output`, with the target's own width of the MLP.
NEURON_RECIPE = [*NEURON_NORMS, *PEER_DRAFT, "draft.intermediate_size=null", *PEER_LOSS, *PEER_OPTIMIZER]
OURS = [*NEURON_RECIPE, "draft.ttt_steps=4", "loss.on_prompts=true", "draft.dropout=0.1"]
SETTINGS = {
    "base": [],
    "peer's optimizer": PEER_OPTIMIZER,
    "peer's recipe": [*THREE_NORMS, *PEER_DRAFT, *PEER_LOSS, *PEER_OPTIMIZER],
    "peer's recipe, two norms": [*NEURON_NORMS, *PEER_DRAFT, *PEER_LOSS, *PEER_OPTIMIZER],
    "peer's recipe, our optimizer": [*THREE_NORMS, *PEER_DRAFT, *PEER_LOSS],
    "ours": OURS,
    "ours, answers only": [*OURS, "loss.on_prompts=false"],
    "ours, dropout 0": [*OURS, "draft.dropout=0"],
    "ours, dropout 0.2": [*OURS, "draft.dropout=0.2"],
    "ours, three steps": [*OURS, "draft.ttt_steps=3"],
    "ours, LK hybrid": [*OURS, "loss=lk_hybrid"],
    "ours, trained head": [*OURS, "draft.train_head=true", "optim.lr=1e-3"],
    "ours, no norms": [*OURS, *WITHOUT_NORMS],
    "ours, three norms": [*OURS, "draft.norm_output=true"],
    "two norms": NEURON_NORMS,
    "three norms": THREE_NORMS,
    "two norms, frozen head": [*NEURON_NORMS, "draft.train_head=false"],
    "two norms, frozen head, forward KL": [*NEURON_NORMS, "draft.train_head=false", "loss=forward_kl"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=None, help="a directory; by default the demo's target")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--overrides", nargs="*", default=[], help="of every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--output", type=Path, default=Path("outputs/study"))
    parser.add_argument("--table", action="store_true", help="only print what is measured already")
    args = parser.parse_args()
    if not args.table:
        runs = [partial(train, *run, args=args) for run in product(args.seeds, args.settings)]
        try:
            run_side_by_side(runs, args.jobs)
        finally:
            measure(args)
    print(render_table(args))


def run_folder(setting: str, seed: int, args: argparse.Namespace) -> Path:
    name = setting.replace(", ", "-").replace(" ", "_").replace("'", "")
    return args.output / ("" if args.target is None else Path(args.target).name) / f"{name}-seed{seed}"


def train(seed: int, setting: str, *, args: argparse.Namespace) -> int:
    """Run one training process with its output in a log; return its exit code."""
    folder = run_folder(setting, seed, args)
    overrides = build_overrides(folder, seed=seed, steps=args.steps, target=args.target)
    command = [sys.executable, "-m", "train", *overrides, *SETTINGS[setting], *args.overrides]
    code, _ = run_logged(command, folder.with_name(f"{folder.name}.log"))
    return code


def build_overrides(folder: Path, *, seed: int, steps: int, target: str | None) -> list[str]:
    """Return the overrides that every run has, whatever its setting."""
    overrides = [
        *BASE,
        f"optim.steps={steps}",
        f"interval.eval={steps}",
        f"seed={seed}",
        f"data.seed={seed}",
        f"output_dir={folder.parent}",
        f"run_name={folder.name}",
    ]
    if target is not None:
        overrides += [f"target.path={target}", f"target.name={name_target(target)}"]
    return overrides


def measure(args: argparse.Namespace) -> None:
    """Replay every new checkpoint and write its accepted draft tokens by prompt and round."""
    folders = [
        folder
        for setting, seed in product(args.settings, args.seeds)
        if (folder := run_folder(setting, seed, args)).joinpath("checkpoint").exists()
        and not (folder / "accepted.json").exists()
    ]
    if not folders:
        return
    target = load_cpu_target(args.target)
    prompts = load_unreported_prompts(target.tokenizer)
    texts: list[ReplayText] = []
    for folder in folders:
        draft = load_draft(folder / "checkpoint", target)
        texts = texts or collect_texts(target, prompts, layers=draft.needs.layers, depth=DEPTH)
        rounds = replay_chains(target, draft, texts, [DEPTH])[DEPTH]
        (folder / "accepted.json").write_text(json.dumps(rounds))


def load_unreported_prompts(tokenizer: Any) -> list[EvalPrompt]:
    """Return the held-out prompts that the demo does not report, to choose settings by."""
    conf = compose("train", TrainConf, ["draft=demo"])
    every, reported = (
        load_eval_prompts(tokenizer, None, limit=limit) for limit in (None, conf.evaluation.prompts_per_category)
    )
    reported_ids = {prompt.id for prompt in reported}
    return [prompt for prompt in every if prompt.id not in reported_ids]


def count_rounds(setting: str, args: argparse.Namespace) -> dict[int, ndarray]:
    """Return the counts by seed of the runs that are measured."""
    files = {seed: run_folder(setting, seed, args) / "accepted.json" for seed in args.seeds}
    return {seed: tabulate_rounds(json.loads(file.read_text()), DEPTH) for seed, file in files.items() if file.exists()}


def render_table(args: argparse.Namespace) -> str:
    """Return tau by seed and together, its difference to the first setting on the seeds of both, and acceptance."""
    columns, rows = ["setting", "tau by seed", "tau", "over the first, 95 % interval", "accepted at 1-4"], []
    first: dict[int, ndarray] = {}
    for setting in args.settings:
        counts = count_rounds(setting, args)
        if not counts:
            continue
        by_seed = ", ".join(f"{acceptance_length(c):.2f}" for c in counts.values())
        total = np.sum([*counts.values()], axis=0)
        interval = ""
        if shared := sorted(first.keys() & counts.keys()):
            interval = render_difference(*(np.sum([c[seed] for seed in shared], axis=0) for c in (counts, first)))
        first = first or counts
        rows.append([setting, by_seed, f"{acceptance_length(total):.2f}", interval, render_shares(total)])
    return render_markdown_table(columns, rows)


if __name__ == "__main__":
    main()
