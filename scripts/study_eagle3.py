"""Compare settings of EAGLE-3 at equal steps and tokens: one change at a time, several seeds.

    python -m scripts.study_eagle3 --settings base residual fc --seeds 0 1 2
    python -m scripts.study_eagle3 --target outputs/wide --steps 400 --table

A run is `python -m train` with the overrides of its setting, `--jobs` runs side by side on one
thread each. Its last weights are replayed on the target's own answers to the demo's held-out
prompts, greedy, as a chain of four: that is what decoding accepts, round by round. Finished runs
are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from numpy import ndarray

from data.config import DEMO
from data.eval_prompts.prompts import load_eval_prompts
from infer.measure.intervals import bootstrap_t
from infer.measure.replay import Replay, ReplayText, collect_replay_texts, decoding_starts
from models.device import DeviceConf, DeviceName
from models.drafts import load_draft
from models.speculate.sampling import SamplingConf
from models.speculate.tree import TreeConf, TreeKind
from models.target.target import Target, TargetConf

DEPTH = 4  # of the chain
NEW_TOKENS = 64
BASE = [
    "draft=demo", "draft.vocab_size=null", "optim=demo", "optim.rows_per_step=8",
    "optim.micro_batch_size=8", "data.for_any_target=true", "data.answers.prompts=2048",
    "data.answers.max_new_tokens=80", "tree=chain", f"tree.depth={DEPTH}", "log=console",
    "device=cpu", "device.compile=false", "device.threads=1", "num_eval_prompts=1",
    "evaluation.prompts_per_category=1", "evaluation.max_new_tokens=2",
    "evaluation.batch_sizes=[]",
]  # fmt: skip
NEURON_NORMS = ["draft.norm_before_residual=true", "draft.norm_before_fc=true"]
THREE_NORMS = [*NEURON_NORMS, "draft.norm_output=true"]
# The optimizer of speculators 0.9: Muon scaled like AdamW, weight decay, linear decay.
PEER_OPTIMIZER = [
    "optim.lr=1e-2", "optim.muon_lr=1e-2", "optim.muon_scaling=match_rms_adamw",
    "optim.weight_decay=0.1", "optim.schedule=wsd", "optim.warmup_ratio=0.01",
    "optim.decay_ratio=0.99",
]  # fmt: skip
PEER_LOSS = ["loss=forward_kl", "loss.step_decay=1.0", "loss.reduction=token"]
PEER_DRAFT = ["draft.train_head=false", "draft.ttt_steps=3", "draft.intermediate_size=256"]
SETTINGS = {
    "base": [],
    "peer's optimizer": PEER_OPTIMIZER,
    "peer's recipe": [*THREE_NORMS, *PEER_DRAFT, *PEER_LOSS, *PEER_OPTIMIZER],
    "peer's recipe, two norms": [*NEURON_NORMS, *PEER_DRAFT, *PEER_LOSS, *PEER_OPTIMIZER],
    "peer's recipe, our optimizer": [*THREE_NORMS, *PEER_DRAFT, *PEER_LOSS],
    "peer's recipe, our loss": [*THREE_NORMS, *PEER_DRAFT, *PEER_OPTIMIZER],
    "peer's recipe, our draft": [*THREE_NORMS, *PEER_LOSS, *PEER_OPTIMIZER],
    "residual": NEURON_NORMS[:1],
    "fc": NEURON_NORMS[1:],
    "output": ["draft.norm_output=true"],
    "two norms": NEURON_NORMS,
    "three norms": THREE_NORMS,
    "frozen head": ["draft.train_head=false"],
    "forward KL": ["loss=forward_kl"],
    "two norms, frozen head": [*NEURON_NORMS, "draft.train_head=false"],
    "two norms, frozen head, forward KL": [
        *NEURON_NORMS, "draft.train_head=false", "loss=forward_kl",
    ],
    "three norms, frozen head, forward KL": [
        *THREE_NORMS, "draft.train_head=false", "loss=forward_kl",
    ],
}  # fmt: skip


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
        jobs = list(product(args.seeds, args.settings))
        with ThreadPoolExecutor(args.jobs) as pool:
            codes = list(pool.map(lambda job: train(*job, args=args), jobs))
        measure(args)
        if any(codes):
            sys.exit(f"error: {sum(map(bool, codes))} of {len(jobs)} runs failed; see their logs")
    print(render_table(args))


def run_folder(setting: str, seed: int, args: argparse.Namespace) -> Path:
    name = setting.replace(", ", "-").replace(" ", "_").replace("'", "")
    return args.output / f"{name}-seed{seed}"


def train(seed: int, setting: str, *, args: argparse.Namespace) -> int:
    """Run one training process with its output in a log; return its exit code."""
    folder = run_folder(setting, seed, args)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "train", *BASE, f"optim.steps={args.steps}",
        f"eval_every={args.steps}", f"seed={seed}", f"data.seed={seed}",
        f"output_dir={args.output}", f"run_name={folder.name}", *SETTINGS[setting],
        *args.overrides,
    ]  # fmt: skip
    if args.target is not None:
        command += [f"target.path={args.target}", f"target.name={Path(args.target).name}"]
    with folder.with_suffix(".log").open("w") as log:
        print(f"{folder.name}: {log.name}", flush=True)
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        return subprocess.run(
            command, stdout=log, stderr=log, env=environment, check=False
        ).returncode


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
    name = DEMO if args.target is None else Path(args.target).name
    conf = TargetConf(name=name, path=args.target)
    target = conf.build(DeviceConf(name=DeviceName.cpu, compile=False).build())
    texts: list[ReplayText] = []
    for folder in folders:
        _, draft = load_draft(folder / "checkpoint", target)
        texts = texts or collect_texts(target, draft.needs.layers)
        replay = Replay(target, draft, texts, sampling=SamplingConf())
        chain = TreeConf(kind=TreeKind.chain, depth=DEPTH).build()
        accepted = replay.accepted_lengths({"chain": chain})["chain"]
        rounds = [lengths[decoding_starts(lengths)].tolist() for lengths in accepted]
        (folder / "accepted.json").write_text(json.dumps(rounds))


def collect_texts(target: Target, layers: list[int]) -> list[ReplayText]:
    """Return the target's answers to the demo's held-out prompts."""
    prompts = load_eval_prompts(target.tokenizer, None, limit=None)
    return collect_replay_texts(
        target, prompts, sampling=SamplingConf(), max_new_tokens=NEW_TOKENS, layers=layers,
        lookahead=DEPTH,
    )  # fmt: skip


def count_rounds(setting: str, args: argparse.Namespace) -> ndarray:
    """Return for each prompt the tokens, rounds and rounds that reached each depth, over seeds."""
    sums = []
    for seed in args.seeds:
        file = run_folder(setting, seed, args) / "accepted.json"
        if file.exists():
            counts = [np.array(rounds) for rounds in json.loads(file.read_text())]
            reached = [[(c >= depth).sum() for depth in range(1, DEPTH + 1)] for c in counts]
            sums.append(
                [[c.sum() + len(c), len(c), *r] for c, r in zip(counts, reached, strict=True)]
            )
    return np.array(sums, dtype=np.float64)


def render_table(args: argparse.Namespace) -> str:
    """Return tau by seed and together, its difference to the first setting, and acceptance."""
    lines = [
        "| setting | tau by seed | tau | over the first, 95 % interval | accepted at 1-4 |",
        "|---|---|---:|---|---|",
    ]
    first: ndarray | None = None
    for setting in args.settings:
        counts = count_rounds(setting, args)
        if not len(counts):
            continue
        by_seed = ", ".join(f"{c[:, 0].sum() / c[:, 1].sum():.2f}" for c in counts)
        total = counts.sum(0)
        first = total if first is None else first
        paired = bootstrap_t(
            np.concatenate([total[:, :2], first[:, :2]], 1),
            lambda means: means[..., 0] / means[..., 1] - means[..., 2] / means[..., 3],
        )
        interval = (
            ""
            if paired is None or paired.ci95 is None or total is first
            else (f"{paired.mean:+.2f} [{paired.ci95[0]:+.2f}, {paired.ci95[1]:+.2f}]")
        )
        accepted = " ".join(f"{share:.2f}" for share in total[:, 2:].sum(0) / total[:, 1].sum())
        tau = total[:, 0].sum() / total[:, 1].sum()
        lines.append(f"| {setting} | {by_seed} | {tau:.2f} | {interval} | {accepted} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
