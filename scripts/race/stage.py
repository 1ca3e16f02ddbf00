"""Do one piece of work of a race in a process of its own: write documents, or measure a draft.

    python -m scripts.race.stage outputs/race documents --seed 0
    python -m scripts.race.stage outputs/race runtime --side peer --rate 0.01 --seed 0

`calibration` and `runtime` replay chains in this runtime, on prompts that are not judged and on those that are.
"""

import argparse
from pathlib import Path

import torch

from conf.entry import compose
from data.config import DEMO
from data.eval_prompts.prompts import EvalPrompt, load_calibration_prompts, load_eval_prompts
from models.drafts.registry import build_draft, load_draft
from models.targets.target import Target
from scripts.race.documents import load_peer, split_documents, write_documents
from scripts.race.runs import DEPTHS, OURS, PEER, SIDES, Race, Run
from scripts.race.training import our_overrides
from scripts.studies.chain_rounds import collect_texts, load_cpu_target, replay_chains, tabulate_rounds
from train.checks import build_run_parallel
from train.config.run import TrainConf
from train.rows.packed_rows import load_training_rows

CALIBRATION_PROMPTS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--side", choices=SIDES, default=OURS)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    race = Race.load(args.output)
    STAGES[args.stage](Run(race=race, side=args.side, rate=args.rate, seed=args.seed))


def export_documents(run: Run) -> None:
    """Write the documents that our runs of this seed train on; a run's rate does not matter."""
    conf = compose("train", TrainConf, our_overrides(run))
    parallel = build_run_parallel(conf, trackers=[])
    target = parallel.build_target(conf.target)
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed)
    rows = load_training_rows(conf, target, draft, parallel).rows
    folder = run.race.documents(run.seed)
    write_documents(split_documents(rows), folder, target=target, layers=draft.needs.layers)


def replay_calibration(run: Run) -> None:
    """Count a chain on prompts that are not judged; they choose the rate of a side."""
    target = load_cpu_target(run.race.target)
    prompts = load_calibration_prompts(target.tokenizer, DEMO, CALIBRATION_PROMPTS)
    counts = count_rounds(run, target, prompts, depths=DEPTHS[-1:])
    run.add_figures(calibration=counts)


def replay_judged(run: Run) -> None:
    """Count the chains on the judged prompts."""
    target = load_cpu_target(run.race.target)
    prompts = load_eval_prompts(target.tokenizer, run.race.prompts, limit=None, key="--prompts")
    run.add_figures(runtime=count_rounds(run, target, prompts, depths=DEPTHS))


def count_rounds(run: Run, target: Target, prompts: list[EvalPrompt], *, depths: list[int]) -> dict[int, list]:
    """Return the counts of the replayed chains, by depth."""
    draft = load_peer(run.checkpoint, target) if run.side == PEER else load_draft(run.checkpoint, target)
    texts = collect_texts(target, prompts, layers=draft.needs.layers, depth=max(depths))
    rounds = replay_chains(target, draft, texts, depths)
    return {depth: tabulate_rounds(rounds[depth], depth).tolist() for depth in depths}


STAGES = {"documents": export_documents, "calibration": replay_calibration, "runtime": replay_judged}

if __name__ == "__main__":
    main()
