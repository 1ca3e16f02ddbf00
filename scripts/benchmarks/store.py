"""Measure the demo's feature stores: size, capture and read speed, and training's data wait.

    python -m scripts.benchmarks.store           prints the table
    python -m scripts.benchmarks.store --write   also writes it to docs/features.md

The documents are the demo's training prompts with the original continuation of each text; the demo
itself uses answers of its target, which take one pass per token.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils import logging

from conf.entry import compose
from data.config import CaptureConf
from data.demo.prompts import training_prompts
from data.feature_capture import build_manifest, plan_capture, write_store_file
from data.features.manifest import DOCUMENTS_FILE, shard_name
from data.features.reader import FeatureStore
from data.features.target_pass import run_target
from data.features.writer import ShardBuilder
from data.packing.documents import Packed
from data.packing.pack import pack_documents
from data.packing.sampler import RowOrder
from data.sources.rows import document_from_pair
from infer.report.tables import Table
from models.device.opening import open_device
from models.drafts.registry import build_draft
from models.meta_model import build_meta_target
from models.targets.loading import load_target
from models.targets.target import Target
from scripts.benchmarks.tables import machine, publish
from train.checks import build_run_parallel
from train.config.run import TrainConf
from train.distillation import train_draft
from train.run.folder import open_run

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
DEVICE = ["device=cpu", "device.compile=false"]
LENGTH, ANSWER, LOGGED = 256, 80, 2  # tokens of a row and of an answer; steps per log line
STORES = (("demo", "bf16"), ("demo", "int8"), ("demo-medusa", "bf16"), ("demo-medusa", "int8"))


def measure(name: str, dtype: str, folder: Path, target: Target, steps: int) -> dict[str, str]:
    """Return one row of the table."""
    common = [f"draft={name}", f"data.row_length={LENGTH}", f"run_name={name}-{dtype}", *DEVICE]
    source = ["data=jsonl", f"data.path={folder}/documents.jsonl", f"output_dir={folder}/capture"]
    sizes = [f"dtype={dtype}", "batch=32", "shard_mb=4"]
    conf = compose("capture", CaptureConf, [*common, *source, *sizes])
    target_pass_s, capture_s, store_folder = captured(conf, target)
    source = ["data=captured", f"data.path={store_folder}", f"output_dir={folder}/train"]
    sizes = [f"optim.steps={steps}", f"interval.log={LOGGED}", "held_out.selection=1", "held_out.report=1"]
    train = compose("train", TrainConf, [*common, *source, *sizes])
    hashes = {"target_hash": target.fingerprint, "tokenizer_hash": target.tokenizer_fingerprint}
    needs = build_draft(train.draft, target, loss=train.loss, seed=0).needs
    store = FeatureStore(store_folder, **hashes, needs=needs, dtype=target.device.dtype)
    rows, _ = pack_documents(store.documents, LENGTH, overlap=None)
    read_s, spec = time_epoch(store, rows, at_a_time=train.optim.micro_batch_size), store.manifest.spec
    trained, wait = learn(train, target)
    size = sum(file.stat().st_size for file in store_folder.iterdir()) / spec.tokens
    return {
        "draft": train.draft.method,
        "dtype": dtype,
        "bytes/token": f"{size:.0f}",
        "of 4 H": f"{size / (8 * target.hidden_size):.3f}",
        "supervised": f"{spec.supervised / spec.tokens:.0%}",
        "capture tokens/s": f"{spec.tokens / capture_s:,.0f}",
        "pass alone": f"{spec.tokens / target_pass_s:,.0f}",
        "read tokens/s": f"{spec.tokens / read_s:,.0f}",
        "training tokens/s": f"{trained:,.0f}",
        "data wait": f"{wait:.2%}",
    }


def captured(conf: CaptureConf, target: Target) -> tuple[float, float, Path]:
    """Return the seconds of a plain target pass before each shard and of the capture, and the store's folder.

    The capture is what data/feature_capture.py does.
    """
    plan = plan_capture(conf, build_meta_target(conf.target, target.device.dtype), target.tokenizer)
    manifest = build_manifest(
        plan, conf, computed_in=target.device.dtype, tokenizer_hash=target.tokenizer_fingerprint, command=""
    )
    manifest = replace(manifest, target_sha256=target.fingerprint)
    folder = Path(conf.output_dir) / conf.run_name
    folder.mkdir(parents=True)
    write_store_file(manifest, folder, DOCUMENTS_FILE, plan.document_tensors())
    builder, target_pass_s, capture_s = ShardBuilder(target, plan, batch=conf.batch), 0.0, 0.0
    for number in range(len(plan.shard_token_counts)):
        began = time.perf_counter()
        for row_ids in torch.tensor(plan.shard_rows(number)).split(conf.batch):
            with torch.no_grad():
                run_target(target, plan.schema.layers, plan.packed.batch(row_ids.tolist()))
        pass_ended = time.perf_counter()
        write_store_file(manifest, folder, shard_name(number), builder.build_shard(number))
        target_pass_s += pass_ended - began
        capture_s += time.perf_counter() - pass_ended
    return target_pass_s, capture_s, folder


def time_epoch(store: FeatureStore, rows: Packed, *, at_a_time: int) -> float:
    """Return the seconds in which every row is read once, in the order of a run."""
    order = RowOrder(num_rows=len(rows), rows_per_step=at_a_time, seed=0)
    began = time.perf_counter()
    for step in range(len(rows) // at_a_time):
        store.read_target_output(rows.pieces(order.step_rows(step)), rows.length)
    share = len(rows) // at_a_time * at_a_time / len(rows)
    return (time.perf_counter() - began) / share


def learn(conf: TrainConf, target: Target) -> tuple[float, float]:
    """Return the tokens/s of training steps and the share of their time spent waiting for data."""
    parallel = build_run_parallel(conf, trackers=[])
    metric_logger = train_draft(conf, parallel, open_run(conf, parallel), target)
    warm = [json.loads(line) for line in metric_logger.file.open()][1:]  # nothing is prefetched before the first step
    means = [sum(line[f"train/{name}"] for line in warm) for name in ("tokens_per_s", "data_wait")]
    return means[0] / len(warm), means[1] / len(warm)


def table(args: argparse.Namespace, target: Target) -> Table:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prompts = training_prompts(args.prompts, seed=0)
        sides = [
            target.tokenizer(side)["input_ids"]
            for side in ([prompt.text for prompt in prompts], [prompt.continuation for prompt in prompts])
        ]
        with (folder / "documents.jsonl").open("w") as file:
            for prompt, rest in zip(*sides, strict=True):
                document = document_from_pair(prompt, rest[:ANSWER])
                file.write(json.dumps({"ids": document.ids, "answer": document.answer}) + "\n")
        rows = [measure(*store, folder, target, args.steps) for store in STORES]
    return Table.from_records(
        rows,
        title="Feature store",
        note="`of 4 H`: of bf16 of three captured layers and the final hidden state at every token "
        f"(8 H bytes, H = {target.hidden_size}), ids and index included. Capture (with rounding, "
        "checksums and writing) and the pass alone take turns, shard by shard. Read: one thread, a "
        "whole epoch in a run's order, as the target's own precision, files in the page cache.",
        label_columns=2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128, help="number of documents")
    parser.add_argument("--steps", type=int, default=6, help="training steps")
    parser.add_argument("--write", action="store_true", help="update docs/features.md")
    args = parser.parse_args()
    logging.disable_progress_bar()  # for loading weights
    conf = compose("train", TrainConf, DEVICE)
    target = load_target(conf.target, open_device(conf.device))
    results = table(args, target)
    publish("store", results, setting=machine(target.device), page=PAGE, should_write=args.write)


if __name__ == "__main__":
    main()
