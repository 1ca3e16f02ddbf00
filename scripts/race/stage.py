"""Do one piece of work of a race in a process of its own: write documents, or measure a draft.

    python -m scripts.race.stage outputs/race documents --seed 0
    python -m scripts.race.stage outputs/race runtime --side peer --rate 0.01 --seed 0 --switch=

`calibration` and `runtime` replay chains in this runtime, on prompts that are neither judged nor trained on, and on the
judged ones.
"""

import argparse
from pathlib import Path

import torch

from conf.entry import compose
from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from models.drafts.registry import build_draft, load_draft
from models.targets.target import Target
from scripts.race.documents import load_peer, read_documents, split_documents, write_documents, write_vocabulary
from scripts.race.runs import DEPTHS, OURS, SIDES, Race, Run
from scripts.race.training import our_overrides
from scripts.studies.chain_rounds import (
    collect_texts,
    load_cpu_target,
    load_unread_prompts,
    replay_chains,
    tabulate_rounds,
)
from train.checks import build_run_parallel
from train.config.run import TrainConf
from train.rows.packed_rows import load_training_rows
from train.rows.row_facts import choose_vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--side", choices=SIDES, default=OURS)
    parser.add_argument("--switch", default="")
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    settings = vars(parser.parse_args())
    torch.set_num_threads(1)
    do_stage, race = STAGES[settings.pop("stage")], Race.load(settings.pop("output"))
    do_stage(Run(race=race, **settings))


def export_documents(run: Run) -> None:
    """Write the documents that our runs of this seed train on; a run's rate and switch do not matter.

    Raise UserError, before anything is trained, if they leave too few prompts to choose settings by.
    """
    conf = compose("train", TrainConf, our_overrides(run))
    parallel = build_run_parallel(conf, trackers=[])
    target = parallel.build_target(conf)
    draft = build_draft(conf.draft, target, loss=conf.loss, seed=conf.seed)
    rows = load_training_rows(conf, target, draft, parallel).rows
    choose_vocabulary(draft, target, rows, None)
    documents, folder = split_documents(rows), run.race.documents(run.seed)
    load_choosing_prompts(run, target, [document.ids.tolist() for document in documents])
    write_vocabulary(draft, folder)
    step_tokens = conf.optim.rows_per_step * conf.data.row_length
    write_documents(documents, folder, target=target, layers=draft.needs.layers, step_tokens=step_tokens)


def replay_calibration(run: Run) -> None:
    """Count a chain on prompts that are neither judged nor trained on; they choose the setting of a side."""
    target = load_cpu_target(run.race.target)
    prompts = load_choosing_prompts(run, target, read_documents(run.race.documents(run.seed)))
    run.add_figures(calibration=count_rounds(run, target, prompts, depths=DEPTHS[-1:]))


def load_choosing_prompts(run: Run, target: Target, documents: list[list[int]]) -> list[EvalPrompt]:
    """Return prompts that begin no document and are not judged; raise UserError if there are too few."""
    judged = [prompt.ids for prompt in load_judged_prompts(run, target)]
    return load_unread_prompts(target.tokenizer, run.race.calibration, [*documents, *judged])


def load_judged_prompts(run: Run, target: Target) -> list[EvalPrompt]:
    return load_eval_prompts(target.tokenizer, run.race.prompts, limit=None, key="--prompts")


def replay_judged(run: Run) -> None:
    """Count the chains on the judged prompts."""
    target = load_cpu_target(run.race.target)
    run.add_figures(runtime=count_rounds(run, target, load_judged_prompts(run, target), depths=DEPTHS))


def count_rounds(run: Run, target: Target, prompts: list[EvalPrompt], *, depths: list[int]) -> dict[int, list]:
    """Return the counts of the replayed chains, by depth."""
    draft = (load_draft if run.side == OURS else load_peer)(run.checkpoint, target)
    texts = collect_texts(target, prompts, layers=draft.needs.layers, depth=max(depths))
    rounds = replay_chains(target, draft, texts, depths)
    return {depth: tabulate_rounds(rounds[depth], depth).tolist() for depth in depths}


STAGES = {"documents": export_documents, "calibration": replay_calibration, "runtime": replay_judged}

if __name__ == "__main__":
    main()
