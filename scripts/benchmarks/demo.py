"""Compare speed and memory with transformers and with our own plain forms, in one run.

    make bench                                         everything, with the newest trained draft
    python -m scripts.benchmarks.demo --write          also writes the tables to docs/benchmarks.md
    python -m scripts.benchmarks.demo --only ar,loss   parts: ar, lookup, engines, loss, train
    python -m scripts.benchmarks.demo --target DIR --checkpoint DIR --threads 2

docs/benchmarks.md explains what is measured and how to read it.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.utils import logging

from conf.entry import compose, exit_with_error
from data.eval_prompts.prompts import load_eval_prompts
from infer.inputs.checkpoint_paths import find_newest_run, list_finished_checkpoints
from infer.report.tables import Table
from models.checkpoints.checkpoint_files import read_config
from models.drafts.options import CausalLMConf, DraftConf, Eagle3Conf
from models.drafts.registry import find_draft_class, load_draft
from models.io.errors import UserError
from models.targets.loading import load_target
from models.targets.precision import build_device
from scripts.benchmarks import loss, training
from scripts.benchmarks.tables import machine, publish
from scripts.engines import comparison, decoding
from train.config.run import TrainConf

PARTS = ("ar", "lookup", "engines", "loss", "train")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, joined by commas")
    parser.add_argument("--target", default="demo", help="a model that transformers can load")
    parser.add_argument("--checkpoint", type=Path, help="default: the newest finished run")
    parser.add_argument("--draft-model", type=Path, help="default: the newest such run")
    parser.add_argument("--tree", default="mixed", help="an option of conf/tree")
    parser.add_argument("--threads", type=int, help="default: PyTorch's choice")
    parser.add_argument("--limit", type=int, default=3, help="prompts per category")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="timed training steps per configuration")
    parser.add_argument("--eager", action="store_true", help="compile nothing, neither ours nor theirs")
    parser.add_argument("--wrapped", action="store_true", help="also dynamic caches under torch.compile (minutes)")
    parser.add_argument("--write", action="store_true", help="update docs/benchmarks.md")
    for name, value in asdict(loss.Size()).items():
        parser.add_argument(f"--loss-{name}", type=int, default=value)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of conf/train.yaml")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> Iterator[tuple[str, Table, str]]:
    """Yield the name, table and setting of each part; raise UserError before anything is timed."""
    parts = chosen(args.only)
    checkpoint = drafts_folder(args.checkpoint) if "lookup" in parts else None
    draft_folders = others_drafts(args) if "engines" in parts else []
    overrides = [f"target.name={args.target}", f"tree={args.tree}", *args.overrides]
    overrides += [f"device.threads={args.threads}"] if args.threads else []
    overrides += ["device.compile=false"] if args.eager else []
    conf = compose("train", TrainConf, overrides)
    device = build_device(conf.device, conf.target)
    target = load_target(conf.target, device)
    draft = load_draft(checkpoint, target) if checkpoint else None
    machine_text = machine(device)
    setting = f"target `{args.target}`, {machine_text}"

    if "loss" in parts:
        size = loss.Size(**{n: vars(args)[f"loss_{n}"] for n in asdict(loss.Size())})
        yield "loss", loss.compare(size, threads=torch.get_num_threads()), machine_text
    if "train" in parts:
        yield "train", training.compare(conf, target, steps=args.steps), setting
    if not {"ar", "lookup", "engines"} & set(parts):
        return
    prompts = [prompt.ids for prompt in load_eval_prompts(target.tokenizer, None, limit=args.limit)]
    copies, new, tree = decoding.models(target.model.name_or_path, device), args.new_tokens, conf.tree.build()
    # The settings of transformers compile more than 8 variants, which is PyTorch's limit.
    raised_limit = torch._dynamo.config.patch(recompile_limit=64)
    with raised_limit, device.cpu_threads_for(target.num_parameters // target.num_layers):
        setting = f"target `{args.target}`, {machine(device)}"
        if "ar" in parts:
            table = decoding.autoregressive(target, copies, prompts, new_tokens=new, wrapped=args.wrapped)
            yield "ar", table, setting
        if draft is not None:
            table = decoding.drafted(target, draft, tree, copies, prompts, new_tokens=new)
            yield "lookup", table, setting
        if "engines" in parts:
            drafts = {folder: load_draft(folder, target) for folder in draft_folders}
            table = comparison.compare(target, drafts, tree, copies, prompts, new_tokens=new)
            yield "engines", table, setting


def chosen(only: str) -> list[str]:
    parts = only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise UserError(f"--only: must be some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    return parts


def drafts_folder(checkpoint: Path | None) -> Path:
    """Return the folder of the trained draft; raise UserError if there is none."""
    try:
        return checkpoint or find_newest_run()
    except UserError as error:
        raise UserError(
            "--checkpoint: no finished training run under outputs/train, got none; run "
            "`python -m train` first, give --checkpoint DIR, or leave it out: --only ar,loss,train"
        ) from error


def others_drafts(args: argparse.Namespace) -> list[Path]:
    """Return the folders of an EAGLE-3 draft and a draft model: the given ones or the newest."""
    eagle3 = args.checkpoint or newest_of(Eagle3Conf, "run `python -m train`")
    draft_model = args.draft_model or newest_of(CausalLMConf, "run `python -m train draft=demo-lm`")
    return [folder for folder in (eagle3, draft_model) if folder]


def newest_of(method: type[DraftConf], remedy: str) -> Path | None:
    """Return the checkpoint of the method's newest run; without one print a line, return None."""
    for folder in list_finished_checkpoints():
        if find_draft_class(method).matches_config(read_config(folder)):
            return folder
    print(f"engines: no {method.method} draft under outputs/train, measuring without it; {remedy}")
    return None


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    logging.disable_progress_bar()  # for loading weights
    try:
        for name, table, setting in measure(args):
            publish(name, table, setting=setting, should_write=args.write)
    except UserError as error:
        exit_with_error(error)


if __name__ == "__main__":
    main()
