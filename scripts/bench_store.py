"""The demo's feature stores: bytes, how fast they are captured and read, and what training waits.

    python -m scripts.bench_store                      prints the table
    python -m scripts.bench_store --write              also puts it into docs/features.md

The documents are the demo's training texts as they go on themselves; the demo's own are answered by
its target, at a pass a token.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from conf.entry import compose
from data.capture import made_of, planned, put
from data.demo.prompts import training_prompts
from data.features.capture_progress import Book
from data.features.config import CaptureConf
from data.features.manifest import DOCUMENTS, shard_name
from data.features.reader import Store
from data.features.target_pass import features
from data.features.writer import Capture
from data.packing.documents import Packed
from data.packing.pack import pack
from data.packing.sampler import Order
from data.sources.tokenized import from_pair
from infer.report.tables import Table
from models.drafts.base import Draft
from models.meta_model import outline
from models.target.target import Target
from scripts.bench_tables import machine, show, write
from train.config import TrainConf
from train.log import Log
from train.loop import Loop
from train.run import open_run

PAGE = Path(__file__).parent.parent / "docs" / "features.md"
LENGTH, ANSWER, LOGGED = 256, 80, 2  # tokens of a row and of an answer; steps of a logged line
STORES = (("demo", "bf16"), ("demo", "int8"), ("demo-medusa", "bf16"), ("demo-medusa", "int8"))


@dataclass(kw_only=True)
class Timed:
    """Seconds of the target's pass alone, and of the capture, over the same rows."""

    alone: float = 0.0
    captured: float = 0.0


def measure(name: str, dtype: str, folder: Path, target: Target, steps: int) -> list[str]:
    """A line of the table."""
    conf = compose("capture", CaptureConf, [
        f"draft={name}", "data=jsonl", f"data.path={folder}/documents.jsonl",
        f"data.length={LENGTH}", f"dtype={dtype}", "batch=32", "shard_mb=4", "device=cpu",
        "device.compile=false", f"run_name={name}-{dtype}", f"output_dir={folder}/capture",
    ])  # fmt: skip
    timed, place = captured(conf, target)
    train = compose("train", TrainConf, [
        f"draft={name}", "data=captured", f"data.path={place}", f"data.length={LENGTH}",
        "device=cpu", "device.compile=false", f"optim.steps={steps}", f"log.every={LOGGED}",
        f"run_name={name}-{dtype}", f"output_dir={folder}/train",
    ])  # fmt: skip
    draft = train.draft.build(target, loss=train.loss, seed=0)
    store = Store.open(
        place, target_hash=target.fingerprint, tokenizer_hash=target.tokenizer_fingerprint,
        needs=draft.needs, dtype=target.device.dtype,
    )  # fmt: skip
    rows, _ = pack(store.documents, LENGTH, overlap=None)
    read, made = epoch(store, rows, at_a_time=train.optim.batch_size), store.manifest.made
    trained, wait = learn(train, target, draft, store, rows)
    size = sum(file.stat().st_size for file in place.iterdir()) / made.tokens
    return [
        train.draft.method, dtype, f"{size:.0f}", f"{size / (8 * target.hidden_size):.3f}",
        f"{made.supervised / made.tokens:.0%}", f"{made.tokens / timed.captured:,.0f}",
        f"{made.tokens / timed.alone:,.0f}", f"{made.tokens / read:,.0f}", f"{trained:,.0f}",
        f"{wait:.2%}",
    ]  # fmt: skip


def captured(conf: CaptureConf, target: Target) -> tuple[Timed, Path]:
    """Capture as data/capture.py does; before each shard the target looks at its rows alone."""
    plan = planned(conf, outline(conf.target, target.device.dtype), target.tokenizer)
    made = made_of(plan, conf, target.device, target.tokenizer_fingerprint)
    book = Book(conf, made, plan.packed.documents, command="")
    book.folder.mkdir(parents=True)
    book.begin(target.fingerprint)
    put(book, DOCUMENTS, plan.documents_file(), {})
    camera, timed = Capture(target, plan, batch=conf.batch), Timed()
    for number in range(len(plan.counts)):
        began = time.perf_counter()
        for some in torch.tensor(plan.rows(number)).split(conf.batch):
            with torch.no_grad():
                features(target, plan.layout.layers, plan.packed.batch(some.tolist()))
        looked = time.perf_counter()
        put(book, shard_name(number), *camera.shard(number, lambda *_: None))
        timed.alone += looked - began
        timed.captured += time.perf_counter() - looked
    return timed, book.folder


def epoch(store: Store, rows: Packed, *, at_a_time: int) -> float:
    """Seconds in which every row is read once, in a run's order."""
    order = Order(rows=len(rows), batch_size=at_a_time, seed=0)
    began = time.perf_counter()
    for step in range(len(rows) // at_a_time):
        store.seen(rows.pieces(order.batch(step)), rows.length)
    share = len(rows) // at_a_time * at_a_time / len(rows)
    return (time.perf_counter() - began) / share


def learn(
    conf: TrainConf, target: Target, draft: Draft, store: Store, rows: Packed
) -> tuple[float, float]:
    """Tokens/s of training steps, and the share of their time that they waited for data."""
    parallel = conf.processes(trackers=[])
    run = open_run(conf, parallel)
    Loop(
        conf=conf, parallel=parallel, device=parallel.device, target=target, draft=draft,
        rows=rows, store=store, state=run, log=Log(conf.log, run, parallel.accelerator),
        evaluate=lambda _: {"delivered_per_round": 0.0},
    ).run()  # fmt: skip
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    warm = lines[1:]  # the first step finds nothing ready
    means = [sum(line[f"train/{name}"] for line in warm) for name in ("tokens_per_s", "data_wait")]
    return means[0] / len(warm), means[1] / len(warm)


def table(args: argparse.Namespace, target: Target) -> Table:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        drawn = training_prompts(args.prompts, seed=0)
        sides = [target.tokenizer(side)["input_ids"] for side in (
            [prompt.text for prompt in drawn], [prompt.rest for prompt in drawn]
        )]  # fmt: skip
        with (folder / "documents.jsonl").open("w") as file:
            for prompt, rest in zip(*sides, strict=True):
                one = from_pair(prompt, rest[:ANSWER])
                file.write(json.dumps({"ids": one.ids, "answer": one.answer}) + "\n")
        rows = [measure(*which, folder, target, args.steps) for which in STORES]
    return Table(
        title="Feature store",
        note="`of 4 H`: of bf16 of three captured layers and the final hidden state at every token "
        f"(8 H bytes, H = {target.hidden_size}), ids and index included. Capture (with rounding, "
        "checksums and writing) and the pass alone take turns, shard by shard. Read: one thread, a "
        "whole epoch in a run's order, as the target's own precision, files in the page cache.",
        columns=[
            "draft", "dtype", "bytes/token", "of 4 H", "supervised", "capture tokens/s",
            "pass alone", "read tokens/s", "training tokens/s", "data wait",
        ],
        rows=rows,
        labels=2,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=128, help="of which documents are made")
    parser.add_argument("--steps", type=int, default=6, help="of training")
    parser.add_argument("--write", action="store_true", help="update docs/features.md")
    args = parser.parse_args()
    logging.disable_progress_bar()  # of weights being loaded
    conf = compose("train", TrainConf, ["device=cpu", "device.compile=false"])
    target = conf.target.build(conf.device.build())
    found = table(args, target)
    show(found)
    if args.write:
        write("store", found, setting=machine(target.device), page=PAGE)


if __name__ == "__main__":
    main()
