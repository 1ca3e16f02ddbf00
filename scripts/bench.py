"""Measure speed and memory beside transformers and beside our own plain forms, in one run.

    make bench                                        everything, with the newest trained draft
    python scripts/bench.py --write                   also puts the tables in docs/benchmarks.md
    python scripts/bench.py --only ar,loss            some parts: ar, lookup, engines, loss, train
    python scripts/bench.py --target DIR --checkpoint DIR --threads 2

docs/benchmarks.md says what is measured and how to read it.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))  # of any directory that it is called from

from conf.entry import compose, refuse
from data.eval_prompts.prompts import held_out
from infer.checkpoints import newest_run
from infer.report.tables import Table
from models.checkpoint import read_config
from models.drafts import load_draft
from models.drafts.base import DraftConf
from models.drafts.causal_lm import CausalLMConf
from models.drafts.eagle3 import Eagle3Conf
from models.errors import UserError
from scripts import bench_decoding, bench_engines, bench_loss, bench_train
from scripts.bench_tables import machine, show, write
from train.config import TrainConf

PARTS = ("ar", "lookup", "engines", "loss", "train")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas")
    parser.add_argument("--target", default="demo", help="a model that transformers can load")
    parser.add_argument("--checkpoint", type=Path, help="default: the newest finished run")
    parser.add_argument("--draft-model", type=Path, help="default: the newest such run")
    parser.add_argument("--tree", default="mixed", help="an option of conf/tree")
    parser.add_argument("--threads", type=int, help="default: as PyTorch chooses")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each category")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="timed training steps of each way")
    parser.add_argument("--eager", action="store_true", help="compile nothing of ours or of theirs")
    parser.add_argument(
        "--wrapped", action="store_true", help="also dynamic caches under torch.compile (minutes)"
    )
    parser.add_argument("--write", action="store_true", help="update docs/benchmarks.md")
    for name, value in asdict(bench_loss.Size()).items():
        parser.add_argument(f"--loss-{name}", type=int, default=value)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of conf/train.yaml")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> Iterator[tuple[str, Table, str]]:
    """Each part's name, table and setting, as soon as it is there. Refuses before it measures."""
    parts = chosen(args.only)
    checkpoint = drafts_folder(args.checkpoint) if "lookup" in parts else None
    beside = others_drafts(args) if "engines" in parts else []
    overrides = [f"target.name={args.target}", f"tree={args.tree}", *args.overrides]
    overrides += [f"device.threads={args.threads}"] if args.threads else []
    overrides += ["device.compile=false"] if args.eager else []
    conf = compose("train", TrainConf, overrides)
    device = conf.device.build()
    target = conf.target.build(device)
    draft = load_draft(checkpoint, target)[1] if checkpoint else None
    place = machine(device)
    setting = f"target `{args.target}`, {place}"

    if "loss" in parts:
        size = bench_loss.Size(**{n: vars(args)[f"loss_{n}"] for n in asdict(bench_loss.Size())})
        yield "loss", bench_loss.compare(size, threads=torch.get_num_threads()), place
    if "train" in parts:
        yield "train", bench_train.compare(conf, target, steps=args.steps), setting
    if not {"ar", "lookup", "engines"} & set(parts):
        return
    held = [prompt.ids for prompt in held_out(target.tokenizer, None, limit=args.limit)]
    copies, new = bench_decoding.models(target.model.name_or_path, device), args.new_tokens
    # what transformers compiles has more than 8 variants, PyTorch's limit, over all its settings
    many = torch._dynamo.config.patch(recompile_limit=64)
    with many, device.shared_if_worth(target.parameters // target.num_layers):
        setting = f"target `{args.target}`, {machine(device)}"
        if "ar" in parts:
            table = bench_decoding.autoregressive(
                target, copies, held, new_tokens=new, wrapped=args.wrapped
            )
            yield "ar", table, setting
        if draft is not None:
            tree = conf.tree.build()
            table = bench_decoding.drafted(target, draft, tree, copies, held, new_tokens=new)
            yield "lookup", table, setting
        if "engines" in parts:
            drafts = {folder: load_draft(folder, target)[1] for folder in beside}
            tree = conf.tree.build()
            table = bench_engines.compare(target, drafts, tree, copies, held, new_tokens=new)
            yield "engines", table, setting


def chosen(only: str) -> list[str]:
    parts = only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise UserError(f"--only: must be some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    return parts


def drafts_folder(given: Path | None) -> Path:
    """Where the trained draft is. Raises UserError before anything is timed if there is none."""
    try:
        return given or newest_run()
    except UserError as error:
        raise UserError(
            "--checkpoint: no finished training run under outputs/train, got none; run "
            "`python -m train` first, give --checkpoint DIR, or leave it out: --only ar,loss,train"
        ) from error


def others_drafts(args: argparse.Namespace) -> list[Path]:
    """An EAGLE-3 draft and a draft model, those that are given or the newest ones."""
    return [
        folder
        for folder in (
            args.checkpoint or newest_of(Eagle3Conf, "run `python -m train`"),
            args.draft_model or newest_of(CausalLMConf, "run `python -m train draft=demo-lm`"),
        )
        if folder
    ]


def newest_of(method: type[DraftConf], remedy: str) -> Path | None:
    """The newest run of a method; None, and a word, where there is none."""
    runs = sorted(Path("outputs/train").glob("*/report.json"), key=lambda r: r.stat().st_mtime)
    for folder in [run.parent / "checkpoint" for run in reversed(runs)]:
        if method.reads(read_config(folder)):
            return folder
    print(f"engines: no {method.method} draft under outputs/train, so without one; {remedy}")
    return None


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    logging.disable_progress_bar()  # of weights being loaded
    try:
        for name, table, setting in measure(args):
            show(table)
            if args.write:
                write(name, table, setting=setting)
    except UserError as error:
        refuse(error)


if __name__ == "__main__":
    main()
