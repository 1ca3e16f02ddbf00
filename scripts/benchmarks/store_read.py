"""Measure how fast a feature store with the width of a real target is read; features are random.

    python -m scripts.benchmarks.store_read           the width of an 8B model
    python -m scripts.benchmarks.store_read --write   also writes the table to docs/features.md

Read tokens/s must exceed the training speed of a device: a thread reads while the device trains.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import torch

from data.config import CaptureConf, DataConf, Dtype, TeacherKind
from data.feature_capture import build_manifest, write_store_file
from data.features.manifest import DOCUMENTS_FILE, Manifest, shard_name
from data.features.plan import CapturePlan
from data.features.reader import FeatureStore
from data.features.schema import build_schema
from data.packing.documents import Documents
from data.packing.pack import pack_documents
from data.sources.rows import TokenizedDocument
from infer.report.tables import Table
from models.device.config import DeviceConf, DeviceName
from models.device.opening import open_device
from models.drafts.base import Needs
from models.drafts.options import CausalLMConf, DraftConf, Eagle3Conf, MedusaConf
from scripts.benchmarks.store import PAGE, time_epoch
from scripts.benchmarks.tables import machine, publish

DOCUMENTS_READ, EPOCHS, TOP_K, VOCAB = 40, 3, 64, 151_936
LENGTH = DataConf().row_length
EAGLE3 = Eagle3Conf(), Needs(layers=[2, 18, 33], hidden=False, context=True)
MEDUSA = MedusaConf(), Needs(layers=[], hidden=True, context=False)
LANGUAGE_MODEL = CausalLMConf(name="random"), Needs(layers=[], hidden=False, context=False)
STORES = (
    (*EAGLE3, Dtype.bf16, TeacherKind.hidden),
    (*EAGLE3, Dtype.int8, TeacherKind.hidden),
    (*EAGLE3, Dtype.fp8, TeacherKind.hidden),
    (*EAGLE3, Dtype.int8, TeacherKind.topk),
    (*MEDUSA, Dtype.int8, TeacherKind.hidden),
    (*LANGUAGE_MODEL, Dtype.int8, TeacherKind.topk),
)


def documents() -> Documents:
    """Build documents like conversations: few are long; the prompt is a fifth to three fifths."""
    rng, documents = random.Random(0), []
    for _ in range(DOCUMENTS_READ):
        length = min(LENGTH, max(64, int(rng.lognormvariate(6.2, 0.8))))
        prompt = int(length * rng.uniform(0.2, 0.6))
        answer = [position >= prompt for position in range(length)]
        documents.append(TokenizedDocument(ids=[1] * length, answer=answer))
    return Documents.from_documents(documents)


def write_random_store(conf: CaptureConf, needs: Needs, hidden: int, folder: Path) -> Manifest:
    """Write a complete store of random features into a folder, and return its manifest."""
    schema = build_schema(conf, needs, hidden_size=hidden, vocab_size=VOCAB)
    plan, _ = CapturePlan.from_documents(documents(), schema, conf)
    manifest = build_manifest(plan, conf, computed_in=torch.bfloat16, tokenizer_hash="", command="")
    write_store_file(manifest, folder, DOCUMENTS_FILE, plan.document_tensors())
    for number, (tokens, supervised) in enumerate(plan.shard_token_counts.tolist()):
        tensors = {}
        for spec in schema.tensor_specs:
            shape = (tokens if spec.per_token else supervised, *spec.shape)
            tensors[spec.name] = torch.randint(100, shape, dtype=torch.uint8).to(spec.dtype)
        write_store_file(manifest, folder, shard_name(number), tensors)
    return manifest


def measure(draft: DraftConf, needs: Needs, dtype: Dtype, teacher: TeacherKind, *, hidden: int) -> list[str]:
    """Return one row of the table."""
    conf = CaptureConf(draft=draft, dtype=dtype, teacher=teacher, top_k=TOP_K, run_name="random")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        spec = write_random_store(conf, needs, hidden, folder).spec
        size = sum(file.stat().st_size for file in folder.iterdir()) / spec.tokens
        store = FeatureStore(
            folder, target_hash="", tokenizer_hash="", needs=needs, dtype=torch.bfloat16, checksums=False
        )
        rows, _ = pack_documents(store.documents, LENGTH, overlap=None)
        seconds, cpu_seconds = [], []
        for _ in range(EPOCHS):
            cpu_began = time.process_time()
            seconds.append(time_epoch(store, rows, at_a_time=1))
            cpu_seconds.append(time.process_time() - cpu_began)
    kind = f"{TOP_K} likeliest" if teacher is TeacherKind.topk else "hidden state"
    return [
        draft.method,
        dtype.value,
        kind,
        f"{size:,.0f}",
        f"{size / (8 * hidden):.3f}",
        f"{spec.supervised / spec.tokens:.0%}",
        f"{spec.tokens / min(seconds):,.0f}",
        f"{spec.tokens / min(cpu_seconds):,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096, help="size of a hidden state")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="update docs/features.md")
    args = parser.parse_args()
    device = open_device(DeviceConf(name=DeviceName.cpu, threads=args.threads, compile=False))
    table = Table(
        title="Reading a feature store",
        note=f"Random features, H = {args.hidden}, {DOCUMENTS_READ} documents in rows of {LENGTH}, "
        f"in bfloat16 as read. The best of {EPOCHS} epochs, row by row in a run's order, files in "
        "the page cache; `a CPU-second` is what is left on a machine that does nothing else.",
        columns=["draft", "dtype", "teacher", "bytes/token", "of 4 H", "supervised", "read tokens/s", "a CPU-second"],
        rows=[measure(*store, hidden=args.hidden) for store in STORES],
        label_columns=3,
    )
    publish("read", table, setting=machine(device), page=PAGE, should_write=args.write)


if __name__ == "__main__":
    main()
