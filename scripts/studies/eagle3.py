"""Compare settings of EAGLE-3 at equal steps and tokens: one change at a time, several seeds.

    python -m scripts.studies.eagle3 --settings ours "ours, no norms" --seeds 0 1 2
    python -m scripts.studies.eagle3 --target outputs/wide --steps 400 --table

A run is `python -m train` with the overrides of its setting, `--jobs` runs side by side on one
thread each. Its last weights are replayed on the target's own answers to prompts that no run has read and no report
judges, greedy, as a chain of four: that is what decoding accepts, round by round. Finished runs are not repeated.
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
from data.demo.prompts import training_prompts
from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from infer.measure.replay import ReplayText
from infer.report.number_format import Table
from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from models.drafts.registry import load_draft
from scripts.benchmarks.tables import machine, publish
from scripts.processes import run_logged, run_side_by_side
from scripts.studies.chain_rounds import (
    NUM_UNREAD,
    acceptance_length,
    collect_texts,
    load_cpu_target,
    load_unread_prompts,
    name_target,
    render_difference,
    render_shares,
    replay_chains,
    tabulate_rounds,
)
from train.config.run import TrainConf

PAGE = Path(__file__).parents[2] / "docs" / "studies.md"
DEPTH = 4  # of the chain
SEEDS = [0, 1, 2]  # whose prompts the study does not measure, so that all of its runs have the same ones
WITHOUT_NORMS = ["draft.norm_before_residual=false", "draft.norm_before_fc=false"]
BASE = f"""
    optim=demo-medusa loss=lk_hybrid draft.train_head=true {" ".join(WITHOUT_NORMS)} draft.vocab_size=null
    optim.rows_per_step=8 optim.micro_batch_size=8
    data.demo.for_any_target=true data.demo.num_prompts=2048 data.demo.max_new_tokens=80
    tree=chain tree.depth={DEPTH} log=console device=cpu device.compile=false device.threads=1
    held_out.selection=1 evaluation.prompts_per_category=1 evaluation.max_new_tokens=2 evaluation.batch_sizes=[]
""".split()
NEURON_NORMS = ["draft.norm_before_residual=true", "draft.norm_before_fc=true"]
THREE_NORMS = [*NEURON_NORMS, "draft.norm_output=true"]
# The optimizer of speculators 0.9: Muon scaled like AdamW, weight decay, linear decay.
PEER_OPTIMIZER = """
    optim.lr=1e-2 optim.muon_lr=1e-2 optim.muon_scaling=match_rms_adamw optim.weight_decay=0.1
    optim.schedule=wsd optim.warmup_ratio=0.01 optim.decay_ratio=0.99
""".split()  # noqa: SIM905 - a list would take a line for each word
PEER_LOSS = ["loss=forward_kl", "loss.step_decay=1.0", "loss.reduction=token"]
PEER_DRAFT = ["draft.train_head=false", "draft.ttt_steps=3", "draft.intermediate_size=256"]
# The same without `norm_output`, with the target's own width of the MLP.
NEURON_RECIPE = [*NEURON_NORMS, *PEER_DRAFT, "draft.intermediate_size=null", *PEER_LOSS, *PEER_OPTIMIZER]
OURS = [*NEURON_RECIPE, "draft.ttt_steps=4", "loss.on_prompts=true", "draft.dropout=0.1"]
SETTINGS = {
    "ours": OURS,
    "ours, answers only": [*OURS, "loss.on_prompts=false"],
    "ours, dropout 0": [*OURS, "draft.dropout=0"],
    "ours, dropout 0.2": [*OURS, "draft.dropout=0.2"],
    "ours, three steps": [*OURS, "draft.ttt_steps=3"],
    "ours, later steps weigh less": [*OURS, "loss.step_decay=0.8"],
    "ours, soft CE": [*OURS, "loss.name=soft_ce"],
    "ours, LK hybrid": [*OURS, "loss.name=lk_hybrid"],
    "ours, half forward, half reverse KL (JSD)": [*OURS, "loss.name=jsd"],
    "ours, total variation": [*OURS, "loss.name=tv"],
    "ours, trained head": [*OURS, "draft.train_head=true", "optim.lr=1e-3"],
    "ours, no norms": [*OURS, *WITHOUT_NORMS],
    "ours, three norms": [*OURS, "draft.norm_output=true"],
    "ours, no weight decay": [*OURS, "optim.weight_decay=0"],
    "peer's recipe": [*THREE_NORMS, *PEER_DRAFT, *PEER_LOSS, *PEER_OPTIMIZER],
    "peer's recipe, two norms": [*NEURON_NORMS, *PEER_DRAFT, *PEER_LOSS, *PEER_OPTIMIZER],
    "peer's recipe, the first version's optimizer": [*THREE_NORMS, *PEER_DRAFT, *PEER_LOSS],
    "the first version": [],
    "the first version, peer's optimizer": PEER_OPTIMIZER,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=None, help="a directory; by default the demo's target")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--overrides", nargs="*", default=[], help="of every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--output", type=Path, default=Path("outputs/study"))
    parser.add_argument("--table", action="store_true", help="only print what is measured already")
    parser.add_argument("--write", action="store_true", help=f"update docs/{PAGE.name}")
    args = parser.parse_args()
    if not args.table:
        runs = [partial(train, *run, args=args) for run in product(args.seeds, args.settings)]
        try:
            run_side_by_side(runs, args.jobs)
        finally:
            measure(args)
    table, name = build_table(args), name_target(args.target)
    if not table.rows:
        parser.error(f"--output: has no measured runs yet, got {args.output}; leave out --table")
    setting = f"target `{name}`, {machine(open_device(DeviceConf(name=DeviceName.cpu, compile=False)))}"
    publish(f"study-{name}", table, setting=setting, page=PAGE, should_write=args.write)


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
    overrides = [*BASE, f"optim.steps={steps}", f"interval.eval={steps}", f"seed={seed}", f"data.seed={seed}"]
    overrides += [f"output_dir={folder.parent}", f"run_name={folder.name}"]
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
    prompts = load_study_prompts(target.tokenizer)
    texts: list[ReplayText] = []
    for folder in folders:
        draft = load_draft(folder / "checkpoint", target)
        texts = texts or collect_texts(target, prompts, layers=draft.needs.layers, depth=DEPTH)
        rounds = replay_chains(target, draft, texts, [DEPTH])[DEPTH]
        (folder / "accepted.json").write_text(json.dumps(rounds))


def load_study_prompts(tokenizer: Any) -> list[EvalPrompt]:
    """Return prompts that no run of the study reads and no report judges."""
    num_prompts = compose("train", TrainConf, BASE).data.demo.num_prompts
    texts = [prompt.text for seed in SEEDS for prompt in training_prompts(num_prompts, seed)]
    held_out = [prompt.ids for prompt in load_eval_prompts(tokenizer, None, limit=None)]
    return load_unread_prompts(tokenizer, None, [*tokenizer(texts)["input_ids"], *held_out])


def count_rounds(setting: str, args: argparse.Namespace) -> dict[int, ndarray]:
    """Return the counts by seed of the runs that are measured."""
    files = {seed: run_folder(setting, seed, args) / "accepted.json" for seed in args.seeds}
    return {seed: tabulate_rounds(json.loads(file.read_text()), DEPTH) for seed, file in files.items() if file.exists()}


def build_table(args: argparse.Namespace) -> Table:
    """Build the table of tau by seed and together, the difference to the first setting, and acceptance."""
    rows = []
    first: dict[int, ndarray] = {}
    for setting in args.settings:
        counts = count_rounds(setting, args)
        if not counts:
            continue
        by_seed = ", ".join(f"{acceptance_length(c):.2f}" for c in counts.values())
        total = np.sum([*counts.values()], axis=0)
        difference = ""
        if shared := sorted(first.keys() & counts.keys()):
            difference = render_difference(*([c[seed] for seed in shared] for c in (counts, first)))
        first = first or counts
        rows.append([setting, by_seed, f"{acceptance_length(total):.2f}", difference, render_shares(total)])
    return Table(
        title="EAGLE-3, one change at a time",
        columns=["setting", "tau by seed", "tau", "over the first", "accepted at 1-4"],
        rows=rows,
        note=f"{args.steps} steps; tau of a chain of {DEPTH} on {NUM_UNREAD} prompts that are neither trained on nor "
        "judged, greedy; differences have 95 % intervals of the noise between prompts, which are paired, and between "
        "seeds; accepted: share of all rounds that accepted at least 1, 2, ... draft tokens.",
    )


if __name__ == "__main__":
    main()
