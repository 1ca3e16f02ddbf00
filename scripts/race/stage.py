"""Do one piece of work of a race in a process of its own: write documents, or measure a draft.

    python -m scripts.race.stage outputs/race documents --seed 0
    python -m scripts.race.stage outputs/race runtime --side peer --rate 0.01 --seed 0

`calibration` and `runtime` replay chains in this runtime, on prompts that are not judged and on
those that are; `vllm` serves the draft by that engine, the peer's checkpoint as its trainer wrote
it; `lookup` decodes the judged prompts with prompt lookup of transformers, without a draft.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from conf.entry import compose
from data.config import DEMO
from data.eval_prompts.prompts import EvalPrompt, load_calibration_prompts, load_eval_prompts
from models.drafts.base import Draft
from models.drafts.registry import build_draft, load_draft
from models.io.files import write_text_atomically
from models.targets.target import Target
from scripts.engines.comparison import Engine
from scripts.engines.decoding import generate, precision
from scripts.race.documents import load_peer, split_documents, write_documents
from scripts.race.runs import DEPTHS, LOOKUP_FILE, OURS, PEER, SIDES, Race, Run
from scripts.race.training import our_overrides
from scripts.studies.chain_rounds import NEW_TOKENS, collect_texts, load_cpu_target, replay_chains, tabulate_rounds
from train.checks import build_run_parallel
from train.config.run import TrainConf
from train.rows.packed_rows import load_training_rows

CALIBRATION_PROMPTS = 64
LOOKUP_TOKENS = 10  # that prompt lookup proposes at most


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
    rows, _, _ = load_training_rows(conf, target, draft, parallel)
    folder = run.race.documents(run.seed)
    write_documents(split_documents(rows), folder, target=target, layers=draft.needs.layers)


def load_run_draft(run: Run, target: Target) -> Draft:
    """Return the trained draft of either side."""
    if run.side == PEER:
        return load_peer(run.checkpoint, target)
    return load_draft(run.checkpoint, target)


def load_judged_prompts(race: Race, target: Target) -> list[EvalPrompt]:
    """Return the prompts that the drafts are judged on."""
    return load_eval_prompts(target.tokenizer, race.prompts, limit=None, key="--prompts")


def replay_calibration(run: Run) -> None:
    """Count a chain on prompts that are not judged; they choose the rate of a side."""
    target = load_cpu_target(run.race.target)
    prompts = load_calibration_prompts(target.tokenizer, DEMO, CALIBRATION_PROMPTS)
    counts = count_rounds(run, target, prompts, depths=DEPTHS[-1:])
    run.add_figures(calibration=counts)


def replay_judged(run: Run) -> None:
    """Count the chains on the judged prompts."""
    target = load_cpu_target(run.race.target)
    prompts = load_judged_prompts(run.race, target)
    run.add_figures(runtime=count_rounds(run, target, prompts, depths=DEPTHS))


def count_rounds(run: Run, target: Target, prompts: list[EvalPrompt], *, depths: list[int]) -> dict[int, list]:
    """Return the counts of the replayed chains, by depth."""
    draft = load_run_draft(run, target)
    texts = collect_texts(target, prompts, layers=draft.needs.layers, depth=max(depths))
    rounds = replay_chains(target, draft, texts, depths)
    return {depth: tabulate_rounds(rounds[depth], depth).tolist() for depth in depths}


def serve_judged(run: Run) -> None:
    """Count the chains that vLLM decodes, by the engine's own counters."""
    target = load_cpu_target(run.race.target)
    prompts = load_judged_prompts(run.race, target)
    slots = max(len(prompt.ids) for prompt in prompts) + NEW_TOKENS + 2 * max(DEPTHS)
    counts, version = {}, ""
    for depth in DEPTHS:
        engine = Engine(
            [
                run.race.target_path,
                f"--dtype={precision(target)}",
                "--eager",
                "--count",
                "--method=eagle3",
                f"--draft={run.checkpoint}",
                f"--drafted={depth}",
                f"--slots={slots}",
            ]
        )
        try:
            version = engine.read_line()["version"]
            counts[depth] = [count_served(engine, prompt, target) for prompt in prompts]
        finally:
            engine.close()
    run.add_figures(vllm=counts, vllm_version=version)


def count_served(engine: Engine, prompt: EvalPrompt, target: Target) -> list[int]:
    """Return the tokens, the rounds and the rounds that reached each depth for one prompt."""
    answer = engine.request(prompt.ids, NEW_TOKENS, stop=sorted(target.eos_ids))
    rounds, accepted = answer["rounds"], answer["accepted"]
    return [rounds + sum(accepted), rounds, *accepted]


def look_up_judged(run: Run) -> None:
    """Count new tokens and forward passes of prompt lookup; the first pass reads the prompt."""
    target = load_cpu_target(run.race.target)
    prompts = load_judged_prompts(run.race, target)
    model: nn.Module = target.model
    passes = 0

    def count_pass(*_: object) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_pre_hook(count_pass)
    decode = generate(
        model, prompt_lookup_num_tokens=LOOKUP_TOKENS, eos_token_id=sorted(target.eos_ids), pad_token_id=0
    )
    counts = []
    for prompt in prompts:
        before, answer = passes, decode(prompt.ids, NEW_TOKENS)
        counts.append([len(answer), passes - before])
    categories = [prompt.category for prompt in prompts]
    content = json.dumps({"categories": categories, "counts": counts})
    write_text_atomically(run.race.output / LOOKUP_FILE, content)


STAGES = {
    "documents": export_documents,
    "calibration": replay_calibration,
    "runtime": replay_judged,
    "vllm": serve_judged,
    "lookup": look_up_judged,
}

if __name__ == "__main__":
    main()
