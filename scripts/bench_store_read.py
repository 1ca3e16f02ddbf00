"""How fast a feature store is read at the width of a real target. Its features are random numbers.

    python -m scripts.bench_store_read                     the width of an 8B model
    python -m scripts.bench_store_read --write             also puts the table into docs/features.md

Read tokens/s have to exceed what a device trains on; a thread reads while the device learns.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch

from conf.entry import compose
from data.capture import put
from data.features.capture_progress import Book
from data.features.config import CaptureConf
from data.features.manifest import DOCUMENTS, Made, shard_name
from data.features.plan import Plan
from data.features.quantize import Dtype
from data.features.reader import Store
from data.features.schema import Layout, TeacherKind
from data.packing.documents import Documents
from data.packing.pack import pack
from data.packing.sampler import Order
from data.sources.row_formats import Tokenised
from infer.report.tables import Table
from models.device import DeviceConf, DeviceName
from models.drafts.base import Needs
from scripts.bench_store import PAGE
from scripts.bench_tables import machine, show, write

LENGTH, DOCUMENTS_READ, EPOCHS, TOP_K, VOCAB = 2048, 40, 3, 64, 151_936
EAGLE3 = Needs(layers=[2, 18, 33], hidden=False, context=True)
MEDUSA = Needs(layers=[], hidden=True, context=False)
LANGUAGE_MODEL = Needs(layers=[], hidden=False, context=False)
STORES = (
    ("eagle3", EAGLE3, Dtype.bf16, TeacherKind.hidden),
    ("eagle3", EAGLE3, Dtype.int8, TeacherKind.hidden),
    ("eagle3", EAGLE3, Dtype.fp8, TeacherKind.hidden),
    ("eagle3", EAGLE3, Dtype.int8, TeacherKind.topk),
    ("medusa", MEDUSA, Dtype.int8, TeacherKind.hidden),
    ("causal_lm", LANGUAGE_MODEL, Dtype.int8, TeacherKind.topk),
)


def documents() -> Documents:
    """Lengths as conversations have them: few long ones, the prompt a fifth to three."""
    draw, found = random.Random(0), []
    for _ in range(DOCUMENTS_READ):
        length = min(LENGTH, max(64, int(draw.lognormvariate(6.2, 0.8))))
        prompt = int(length * draw.uniform(0.2, 0.6))
        answer = [place >= prompt for place in range(length)]
        found.append(Tokenised(ids=[1] * length, answer=answer))
    return Documents.of(found)


def made(needs: Needs, dtype: Dtype, teacher: TeacherKind, hidden: int, folder: Path) -> Book:
    """A whole store of random features."""
    layout = Layout(
        layers=needs.layers, hidden=needs.hidden, context=needs.context, dtype=dtype,
        teacher=teacher, top_k=TOP_K, hidden_size=hidden, vocab_size=VOCAB,
    )  # fmt: skip
    plan, _ = Plan.of(documents(), layout, length=LENGTH, overlap=None, batch=8, shard_mb=512.0)
    tokens, taught = plan.counts.sum(0).tolist()
    conf = compose("capture", CaptureConf, [f"output_dir={folder}", "run_name=random"])
    book = Book(conf, Made(
        target_sha256="", tokenizer_sha256="", computed_in="bfloat16", layout=layout,
        length=LENGTH, overlap=None, batch=8, documents=DOCUMENTS_READ, tokens=tokens,
        supervised=taught, documents_xxh3="", shards=len(plan.counts),
    ), plan.packed.documents, command="")  # fmt: skip
    book.folder.mkdir()
    put(book, DOCUMENTS, plan.documents_file(), {})
    for number, (tokens, taught) in enumerate(plan.counts.tolist()):
        put(book, shard_name(number), {
            part.name: torch.randint(
                100, (tokens if part.every else taught, *part.shape), dtype=torch.uint8
            ).to(part.dtype)
            for part in layout.parts
        }, {})  # fmt: skip
    return book


def measure(
    draft: str, needs: Needs, dtype: Dtype, teacher: TeacherKind, *, hidden: int
) -> list[str]:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as place:
        book = made(needs, dtype, teacher, hidden, Path(place))
        told = book.manifest.made
        size = sum(file.stat().st_size for file in book.folder.iterdir()) / told.tokens
        store = Store.open(
            book.folder, target_hash="", tokenizer_hash="", needs=needs, dtype=torch.bfloat16,
            checksums=False,
        )  # fmt: skip
        rows, _ = pack(store.documents, LENGTH, overlap=None)
        seconds, busy = [], []
        for _ in range(EPOCHS):
            began, used = time.perf_counter(), time.process_time()
            order = Order(rows=len(rows), batch_size=1, seed=0)
            for step in range(len(rows)):
                store.seen(rows.pieces(order.batch(step)), LENGTH)
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - used)
    kind = f"{TOP_K} likeliest" if teacher is TeacherKind.topk else "hidden state"
    return [
        draft, dtype.value, kind, f"{size:,.0f}", f"{size / (8 * hidden):.3f}",
        f"{told.supervised / told.tokens:.0%}", f"{told.tokens / min(seconds):,.0f}",
        f"{told.tokens / min(busy):,.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096, help="values of a hidden state")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="update docs/features.md")
    args = parser.parse_args()
    device = DeviceConf(name=DeviceName.cpu, threads=args.threads, compile=False).build()
    table = Table(
        title="Reading a feature store",
        note=f"Random features, H = {args.hidden}, {DOCUMENTS_READ} documents in rows of {LENGTH}, "
        f"in bfloat16 as read. The best of {EPOCHS} epochs, row by row in a run's order, files in "
        "the page cache; `a CPU-second` is what is left on a machine that does nothing else.",
        columns=[
            "draft", "dtype", "teacher", "bytes/token", "of 4 H", "supervised", "read tokens/s",
            "a CPU-second",
        ],
        rows=[measure(*store, hidden=args.hidden) for store in STORES],
        labels=3,
    )  # fmt: skip
    show(table)
    if args.write:
        write("read", table, setting=machine(device), page=PAGE)


if __name__ == "__main__":
    main()
