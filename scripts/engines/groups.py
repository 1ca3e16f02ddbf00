"""Compare what drafts of a target are accepted, by category of its prompts.

    python -m scripts.engines.groups [KEY=VALUE ...] --target DIR --prompts judged.jsonl \\
        --drafts outputs/train/A/checkpoint outputs/train/B/checkpoint

Prompts are decoded `--batch` at a time, so there are tokens a round, without a time: `scripts.benchmarks.demo --only
engines` times drafts beside other engines. `--write` updates docs/smollm2.md.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conf.entry import compose
from data.eval_prompts.prompts import EvalPrompt, load_eval_prompts
from infer.engine.decode import Decoder
from infer.report.number_format import Table, format_estimate
from infer.results.intervals import bootstrap_t
from models.drafts.ngram import NgramDraft
from models.drafts.registry import load_draft
from models.targets.loading import load_target
from models.targets.precision import build_device
from models.targets.target import Target
from models.trees.config import TreeConf
from models.trees.sampling_config import SamplingConf
from models.trees.tree import Tree, TreeKind
from scripts.benchmarks.tables import machine, show, write
from scripts.engines.comparison import DRAFTED
from scripts.engines.decoding import slots_of
from train.config.run import TrainConf

PAGE = Path(__file__).parents[2] / "docs" / "smollm2.md"
ALL = "all"  # the row of all categories


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one contender did with one prompt."""

    category: str
    contender: str
    ids: list[int]
    accepted: list[int]  # draft tokens of each round


def decode_in_batches(
    target: Target, drafts: list[Path], tree: Tree, prompts: list[EvalPrompt], new_tokens: int, batch: int
) -> list[Run]:
    """Decode all prompts with lookup, and with a chain of each draft and `tree` if it is another shape."""
    chain = TreeConf(kind=TreeKind.chain, depth=DRAFTED).build()
    cases = [(NgramDraft(), "n-gram", [chain])]
    cases += [
        (draft, draft.method, [*dict.fromkeys([chain, tree])])
        for draft in (load_draft(folder, target) for folder in drafts)
    ]
    ids, runs = [prompt.ids for prompt in prompts], []
    slots = slots_of(ids, new_tokens)
    for draft, name, shapes in cases:
        for shape in shapes:
            decoder = Decoder(target, draft, shape, sampling=SamplingConf(), slots=slots, batch=batch)
            answers = decoder.decode(ids, row_ids=range(len(ids)), max_new_tokens=new_tokens)
            contender = f"{name}, ours, {'chain' if shape is chain else 'tree'}, {shape.size}"
            runs += [
                Run(category=prompt.category, contender=contender, ids=a.ids, accepted=a.accepted)
                for prompt, a in zip(prompts, answers, strict=True)
            ]
            print(contender, flush=True)
    return runs


def build_table(runs: list[Run]) -> Table:
    """Build the table of the tokens that each contender emits a round, and of how often each position is accepted."""
    by_category: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_category[run.category][run.contender].append(run)
    for run in runs:  # afterwards, so that this row is the last
        by_category[ALL][run.contender].append(run)
    names = list(by_category[ALL])
    chains = [name for name in names if "chain" in name]
    rows = []
    for category, part in by_category.items():
        counts = [
            np.array([[sum(run.accepted) + len(run.accepted), len(run.accepted)] for run in part[name]])
            for name in names
        ]
        taus = [format_estimate(bootstrap_t(count, support=(1.0, np.inf))) for count in counts]
        rows.append([category, *taus, *(accepted_by_position(part[name]) for name in chains)])
    return Table(
        title="Tokens a round",
        columns=["category", *names, *(f"{name}: accepted, by position" for name in chains)],
        rows=rows,
        note="Tokens a round with their 95 % interval over prompts; of the rounds of a chain, the share in percent "
        "that accepted its first token, its first two, and so on.",
        label_columns=1,
    )


def accepted_by_position(runs: list[Run]) -> str:
    """Return the share of rounds that accepted each length of a chain, in percent.

    >>> accepted_by_position([Run(category="qa", contender="ours, chain", ids=[], accepted=[2, 0, 1, 1])])
    '75 25'
    """
    accepted = np.array([count for run in runs for count in run.accepted])
    return " ".join(f"{100 * np.mean(accepted >= depth):.0f}" for depth in range(1, accepted.max() + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of a model")
    parser.add_argument("--prompts", required=True, help="a file as for evaluation.prompts")
    parser.add_argument("--batch", type=int, default=32, help="prompts at a time")
    parser.add_argument("--drafts", type=Path, nargs="*", default=[], help="checkpoints")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="prompts per category")
    parser.add_argument("--write", action="store_true", help="update docs/smollm2.md")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of conf/train.yaml")
    args = parser.parse_intermixed_args()
    conf = compose("train", TrainConf, [f"target.name={args.target}", f"target.path={args.target}", *args.overrides])
    device = build_device(conf.device, conf.target)
    target = load_target(conf.target, device)
    prompts = load_eval_prompts(target.tokenizer, args.prompts, limit=args.limit)
    table = build_table(decode_in_batches(target, args.drafts, conf.tree.build(), prompts, args.new_tokens, args.batch))
    show(table)
    if args.write:
        write("groups", table, setting=machine(device), page=PAGE)


if __name__ == "__main__":
    main()
