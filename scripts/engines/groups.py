"""Compare all drafts of a target with other engines, by category of its prompts.

    python -m scripts.engines.groups [KEY=VALUE ...] --target DIR --prompts judged.jsonl --results race.jsonl \\
        --drafts outputs/train/A/checkpoint outputs/train/B/checkpoint

All contenders continue a prompt before the next prompt begins. The first line of the file of results has
the race's settings, each prompt adds a line, and a repeated command goes on after the last line.
`--write` updates docs/smollm2.md. `--batch 32` decodes with ours alone, 32 prompts at a time: tokens a
round, without a time.
"""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.entry import compose, exit_with_error
from data.eval_prompts.prompts import EvalPrompt, fingerprint_prompts, load_eval_prompts
from infer.engine.decode import Decoder
from infer.report.number_format import Table, format_estimate
from infer.results.intervals import bootstrap_t
from models.checkpoints.fingerprints import hash_tensors
from models.drafts.base import Draft
from models.drafts.ngram import NgramDraft
from models.drafts.registry import load_draft
from models.io.console import track_progress
from models.io.errors import UserError, require
from models.targets.loading import load_target
from models.targets.precision import build_device
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree, TreeKind
from scripts.benchmarks.tables import machine, publish
from scripts.engines.comparison import DRAFTED, MISSING, Group, vllm, with_draft, without_draft
from scripts.engines.decoding import (
    LOOKUPS,
    Contender,
    decoding,
    generate,
    models,
    precision,
    slots_of,
    take_turns,
    warm_up,
)
from train.config.run import TrainConf

PAGE = Path(__file__).parents[2] / "docs" / "smollm2.md"
ALL = "all"  # the column of all categories


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one contender did with one prompt."""

    category: str
    contender: str
    seconds: float
    ids: list[int]
    accepted: list[int]  # draft tokens of each round, [] without a draft of ours
    graphs: int = 0  # compiled while it was timed


def load_drafts(target: Target, folders: list[Path]) -> dict[Path, Draft]:
    """Load the drafts of the folders; raise UserError for two of one method, whose results could not be told apart."""
    drafts = {folder: load_draft(folder, target) for folder in folders}
    methods = [draft.method for draft in drafts.values()]
    require(
        len(set(methods)) == len(folders),
        f"--drafts: must be of different methods, got {', '.join(methods)}; leave one out",
    )
    return drafts


def build_groups(
    target: Target, drafts: dict[Path, Draft], conf: TrainConf, prompts: list[list[int]], new_tokens: int
) -> list[Group]:
    """Build the contenders: without a draft, with lookup, and with each of the drafts."""
    name = precision(target)
    model = models(target.model.name_or_path, target.device)[name]
    chain = TreeConf(kind=TreeKind.chain, depth=DRAFTED).build()
    settings = ["n-gram", "ours, chain", str(DRAFTED)]
    lookup = decoding(target, NgramDraft(), chain, prompts=prompts, new_tokens=new_tokens, settings=settings)
    n = LOOKUPS[-1]  # transformers' default, and the fastest in docs/benchmarks.md
    theirs = Contender(settings=["n-gram", "prompt lookup", str(n)], run=generate(model, prompt_lookup_num_tokens=n))
    groups = [
        without_draft(target, model, prompts, new_tokens=new_tokens),
        Group(draft="n-gram", ours=[lookup], others=[theirs], serve=["--method=ngram"]),
    ]
    for folder, draft in drafts.items():
        groups.append(with_draft(target, model, folder, draft, conf.tree.build(), prompts, new_tokens=new_tokens))
    return groups


def decode_in_batches(
    target: Target, drafts: list[Draft], tree: Tree, prompts: list[EvalPrompt], new_tokens: int, batch: int
) -> list[Run]:
    """Decode all prompts with lookup, and with a chain of each draft and `tree` if it is another shape."""
    ids, runs = [prompt.ids for prompt in prompts], []
    for draft in [NgramDraft(), *drafts]:
        is_lookup = isinstance(draft, NgramDraft)
        name = "n-gram" if is_lookup else draft.method
        chain = TreeConf(kind=TreeKind.chain, depth=min(DRAFTED, draft.max_depth)).build()
        for shape in dict.fromkeys([chain] if is_lookup else [chain, tree]):
            slots = slots_of(ids, new_tokens)
            decoder = Decoder(target, draft, shape, sampling=SamplingConf(), slots=slots, batch=batch)
            answers = decoder.decode(ids, row_ids=range(len(ids)), max_new_tokens=new_tokens)
            contender = f"{name} | ours, {'chain' if shape is chain else 'tree'} | {shape.size}"
            runs += [
                Run(category=prompt.category, contender=contender, seconds=0.0, ids=a.ids, accepted=a.accepted)
                for prompt, a in zip(prompts, answers, strict=True)
            ]
            print(contender, flush=True)
    return runs


def hold_race(
    groups: list[Group], target: Target, prompts: list[EvalPrompt], results: Path, new_tokens: int, hashes: list[str]
) -> None:
    """Time every contender on every prompt that has no line in `results` yet, on one of each category in turn.

    Raise UserError if the results are of another race.
    """
    settings = {
        "target": target.fingerprint,
        "precision": precision(target),
        "compiled": target.device.compiles,
        "threads": torch.get_num_threads(),
        "new_tokens": new_tokens,
        "prompts": fingerprint_prompts(prompts),
        "drafts": hashes,
    }
    check_results(results, settings)
    done = {line["prompt"] for line in read_lines(results)[1:]}
    ids = [prompt.ids for prompt in prompts]
    waiting = [(n, prompt) for n, prompt in enumerate(alternate_categories(prompts)) if prompt.id not in done]
    if not waiting:
        return
    num_categories = len({prompt.category for prompt in prompts})
    slots = slots_of(ids, new_tokens) + 2 * DRAFTED
    with vllm(groups, target, target.model, slots=slots) as version:
        print(f"vLLM {version}" if version else MISSING)
        contenders = [c for group in groups for c in [*group.ours, *group.others]]
        settings |= {"vllm": version, "contenders": [c.settings for c in contenders]}
        check_results(results, settings)
        if not read_lines(results):
            append_line(results, settings)
        warm_up(contenders, ids, new_tokens=new_tokens)
        for number, prompt in track_progress(waiting, "prompts"):
            turn = number + number // num_categories  # else a category would always be read in one direction
            take_turns(contenders, prompt.ids, number=turn, new_tokens=new_tokens, untimed=min(ids, key=len))
            runs = [
                {
                    "settings": c.settings,
                    "seconds": c.seconds[-1],
                    "graphs": c.graphs[-1],
                    "ids": c.answers[-1],
                    "accepted": c.accepted,
                }
                for c in contenders
            ]
            append_line(results, {"prompt": prompt.id, "category": prompt.category, "runs": runs})


def check_results(results: Path, settings: dict[str, Any]) -> None:
    """Raise UserError if a file of results begins with other settings."""
    saved, *_ = read_lines(results) or [settings]
    differing = [key for key, value in settings.items() if saved.get(key) != value]
    require(
        not differing,
        f"--results: must be of this race, got another {', '.join(differing)} in {results}; name a new file",
    )


def append_line(results: Path, line: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def alternate_categories(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Return the prompts one category after the other, so that a stopped race tells as much about each."""
    places: dict[str, Iterator[int]] = defaultdict(count)
    numbered = [(next(places[prompt.category]), prompt) for prompt in prompts]
    return [prompt for _, prompt in sorted(numbered, key=itemgetter(0))]


def read_lines(results: Path) -> list[dict[str, Any]]:
    """Return the settings and the complete lines; remove a last one that a kill has torn."""
    text = results.read_bytes() if results.exists() else b""
    complete = text[: text.rfind(b"\n") + 1]
    if complete != text:
        os.truncate(results, len(complete))
    return [*map(json.loads, complete.splitlines())]


def read_runs(results: Path) -> list[Run]:
    """Return all runs of the file of results, prompt by prompt."""
    return [
        Run(category=line["category"], contender=" | ".join(run.pop("settings")), **run)
        for line in read_lines(results)[1:]
        for run in line["runs"]
    ]


def speed_of(runs: list[Run]) -> float:
    """Return the tokens/s of runs: all tokens over all seconds."""
    return sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs)


def split_by_category(runs: list[Run]) -> dict[str, dict[str, list[Run]]]:
    """Return the runs by category and contender; the last category has all of them."""
    parts: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        parts[run.category][run.contender].append(run)
    for run in runs:
        parts[ALL][run.contender].append(run)
    return parts


def speed_table(runs: list[Run]) -> Table:
    """Build the table of tokens/s: a row per contender, a column per category."""
    parts = split_by_category(runs)
    first = next(iter(parts[ALL].values()))
    rows = []
    for contender, its_runs in parts[ALL].items():
        same = sum(run.ids == reference.ids for run, reference in zip(its_runs, first, strict=True))
        speeds = [f"{speed_of(part[contender]):.1f}" for part in parts.values()]
        graphs = sum(run.graphs for run in its_runs)
        rows.append([*contender.split(" | "), *speeds, f"{same} of {len(first)}", str(graphs)])
    return Table(
        title="Tokens per second by category",
        columns=["draft", "decoding", "proposed", *parts, "same answers", "graphs"],
        rows=rows,
        note=f"{len(first)} prompts, {len(first[0].ids)} new tokens each, greedy, one prompt at a "
        "time, from ids to ids; same answers: as our loop without a draft gives; graphs: compiled while measuring.",
        label_columns=3,
    )


def margin_table(runs: list[Run], ours: list[str]) -> Table:
    """Build the table of `ours` over the fastest other of each category, our loop and our lookup included."""
    parts = split_by_category(runs)
    rows = []
    for category, part in parts.items():
        others = {name: its_runs for name, its_runs in part.items() if name not in ours}
        best = max(others, key=lambda name: speed_of(others[name]))
        margins = [
            format_estimate(bootstrap_t(seconds_of(part[best], part[name]), support=(0.0, np.inf))) for name in ours
        ]
        rows.append([category, best.replace(" | ", ", "), f"{speed_of(part[best]):.1f}", *margins])
    return Table(
        title="Beside the fastest other of each category",
        columns=["category", "fastest other", "tokens/s", *(n.replace(" | ", ", ") for n in ours)],
        rows=rows,
        note="Ours over the fastest other; brackets: 95 % interval over prompts.",
        label_columns=2,
    )


def tau_table(runs: list[Run], ours: list[str]) -> Table:
    """Build the table of the tokens that `ours` emit a round, and of how often each position is accepted."""
    rows = []
    for category, part in split_by_category(runs).items():
        counts = [
            np.array([[sum(run.accepted) + len(run.accepted), len(run.accepted)] for run in part[n]]) for n in ours
        ]
        taus = [format_estimate(bootstrap_t(count, support=(1.0, np.inf))) for count in counts]
        rows.append([category, *taus, *(accepted_by_position(part[name]) for name in ours if "chain" in name)])
    names = [name.replace(" | ", ", ") for name in ours]
    return Table(
        title="Tokens a round",
        columns=["category", *names, *(f"{name}: accepted, by position" for name in names if "chain" in name)],
        rows=rows,
        note="Tokens a round with their 95 % interval over prompts; of the rounds of a chain, the share in percent "
        "that accepted its first token, its first two, and so on.",
        label_columns=1,
    )


def accepted_by_position(runs: list[Run]) -> str:
    """Return the share of rounds that accepted each length of a chain, in percent.

    >>> run = Run(category="qa", contender="ours, chain", seconds=1.0, ids=[], accepted=[2, 0, 1, 1])
    >>> accepted_by_position([run])
    '75 25'
    """
    accepted = np.array([count for run in runs for count in run.accepted])
    return " ".join(f"{100 * np.mean(accepted >= depth):.0f}" for depth in range(1, accepted.max() + 1))


def seconds_of(theirs: list[Run], ours: list[Run]) -> np.ndarray:
    return np.array([[t.seconds, o.seconds] for t, o in zip(theirs, ours, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of a model")
    parser.add_argument("--prompts", required=True, help="a file as for evaluation.prompts")
    parser.add_argument("--results", type=Path, help="JSONL, made or continued")
    parser.add_argument("--batch", type=int, help="prompts at a time, in place of a race")
    parser.add_argument("--drafts", type=Path, nargs="*", default=[], help="checkpoints")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="prompts per category")
    parser.add_argument("--write", action="store_true", help="update docs/smollm2.md")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of conf/train.yaml")
    args = parser.parse_intermixed_args()
    if not args.batch:
        if args.results is None:
            parser.error("--results: must be a file, got none; a race writes a line to it after each prompt")
        args.results.parent.mkdir(parents=True, exist_ok=True)
    conf = compose("train", TrainConf, [f"target.name={args.target}", f"target.path={args.target}", *args.overrides])
    target = load_target(conf.target, build_device(conf.device, conf.target))
    prompts = load_eval_prompts(target.tokenizer, args.prompts, limit=args.limit)
    ids = [prompt.ids for prompt in prompts]
    drafts = load_drafts(target, args.drafts)
    if args.batch:
        runs = decode_in_batches(target, [*drafts.values()], conf.tree.build(), prompts, args.new_tokens, args.batch)
        table = tau_table(runs, [*dict.fromkeys(run.contender for run in runs)])
        publish("groups", table, setting=machine(target.device), page=PAGE, should_write=args.write)
        return
    raised_limit = torch._dynamo.config.patch(recompile_limit=64)
    with raised_limit, target.device.cpu_threads_for(target.num_parameters // target.num_layers):
        groups = build_groups(target, drafts, conf, ids, args.new_tokens)
        hashes = [hash_tensors(draft.state_dict()) for draft in drafts.values()]
        hold_race(groups, target, prompts, args.results, args.new_tokens, hashes)
        setting = machine(target.device)
    runs = read_runs(args.results)
    lookup, *ours = [" | ".join(c.settings) for group in groups[1:] for c in group.ours]
    tables = [speed_table(runs), *([margin_table(runs, ours)] if ours else []), tau_table(runs, [lookup, *ours])]
    publish("race", *tables, setting=setting, page=PAGE, should_write=args.write)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with_error(error)
