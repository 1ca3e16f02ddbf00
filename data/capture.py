"""`python -m data.capture`: what a draft needs of its target, kept on disk for many runs.

python -m data.capture draft=NAME data=prepared data.path=outputs/prepare/RUN run_name=NAME

Killed, the same command goes on; where a file was damaged since, it writes that file alone again.
Layout, sizes and several workers: docs/features.md.
"""

import logging
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import xxhash
from torch import Tensor

from conf.entry import config_yaml, entry_point
from data.config import DataConf, Source
from data.features.capture_progress import Book
from data.features.config import CaptureConf
from data.features.disk_check import GB, check_room
from data.features.manifest import DOCUMENTS, File, Made, digest, shard_name
from data.features.plan import METADATA, Plan
from data.features.writer import Capture
from data.packing.documents import read
from data.preview import preview, rows_beside
from data.progress import Progress
from models.checkpoint import atomic_path, tokenizer_fingerprint, writing
from models.console import speak
from models.device import Device
from models.device.graph_budget import Graph
from models.errors import UserError
from models.lock import NAME, hold
from models.meta_model import Outline, outline, outlined

log = logging.getLogger("data.capture")
DEMO = Path("outputs/prepare/demo")
GO_ON = "make room and repeat the command: it goes on with what is missing"
MUCH = 0.1  # of the values lost: of a bell curve int8 loses one in a hundred


@entry_point("capture", CaptureConf)
def main(conf: CaptureConf) -> None:
    speak()
    capture(conf, command=shlex.join(["python", "-m", "data.capture", *sys.argv[1:]]))


def capture(conf: CaptureConf, *, command: str) -> Path:
    """Capture what the store lacks; `command` is what a user repeats to go on with it."""
    conf.data.check_target(conf.target)
    conf = replace(conf, data=answered(conf.data))
    check(conf)
    device = conf.device.build()
    conf.data.check_device(device)
    shape = outline(conf.target, device.dtype)
    tokenizer = conf.target.source.tokenizer()
    plan = planned(conf, shape, tokenizer)
    made = made_of(plan, conf, device, tokenizer_fingerprint(tokenizer))
    book = Book(conf, made, plan.packed.documents, command)
    missing = book.missing()
    check_room(plan, book.folder, budget_gb=conf.budget_gb, there=book.bytes_there())
    if missing:
        with writing(book.folder):
            book.folder.mkdir(parents=True, exist_ok=True)
            hold(book.folder, NAME if conf.workers == 1 else f"{NAME}-{conf.worker:05}")
            if conf.worker == 0:
                with atomic_path(book.folder / "config.yaml") as partial:
                    partial.write_text(config_yaml(conf))
        write(missing, plan, book, conf, device)
    say_rounding(book.manifest.files)
    say_done(book)
    return book.folder


def check(conf: CaptureConf) -> None:
    """Refuse what can be known to be wrong before anything is read."""
    if conf.data.source is Source.captured:
        raise UserError(
            "data.source: must be documents, got captured, which are features already; give "
            "data=prepared"
        )
    first = rows_beside(conf.data, conf.target.source.config, conf.draft.check)
    preview(conf.data, conf.target, first)


def answered(data: DataConf) -> DataConf:
    """The demo's documents are those that data.prepare has left."""
    if data.source is not Source.demo:
        return data
    if not DEMO.exists():
        raise UserError(
            f"data.source: the demo must have been answered, got no {DEMO}; run `python -m "
            "data.prepare`, then this command again"
        )
    return replace(data, source=Source.prepared, path=str(DEMO))


def planned(conf: CaptureConf, shape: Outline, tokenizer) -> Plan:
    """The documents as they will be looked at. Raises UserError where features cannot be kept."""
    needs = outlined(conf.draft, shape, loss=conf.loss, seed=0).needs
    layout = conf.layout(needs, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    skipped: Counter[str] = Counter()
    plan, report = Plan.of(
        read(conf.data, tokenizer, skipped), layout, length=conf.data.length,
        overlap=conf.data.overlap, batch=conf.batch, shard_mb=conf.shard_mb,
    )  # fmt: skip
    report.skipped = dict(skipped)
    log.info("data: %s", report)
    tokens, taught = plan.counts.sum(0)
    a_token, usual = plan.bytes() / tokens, 8 * shape.hidden_size
    log.info(
        "store: %.4g GB in %d shards, %.0f bytes a token (%.3f of bf16 at every token, four states "
        "each); %.0f%% of the tokens are supervised",
        plan.bytes() / GB, len(plan.counts), a_token, a_token / usual, 100 * taught / tokens,
    )  # fmt: skip
    return plan


def made_of(plan: Plan, conf: CaptureConf, device: Device, tokenizer_hash: str) -> Made:
    documents = plan.packed.documents
    tokens, taught = plan.counts.sum(0).tolist()
    return Made(
        target_sha256="",  # known once it is loaded
        tokenizer_sha256=tokenizer_hash, computed_in=str(device.dtype).removeprefix("torch."),
        layout=plan.layout, length=conf.data.length, overlap=conf.data.overlap, batch=conf.batch,
        documents=len(documents), tokens=tokens, supervised=taught,
        documents_xxh3=digest(documents.ids, documents.answer, documents.starts),
        shards=len(plan.counts),
    )  # fmt: skip


def write(missing: list[str], plan: Plan, book: Book, conf: CaptureConf, device: Device) -> None:
    """The missing files, one after another."""
    target = conf.target.build(device)
    book.begin(target.fingerprint)
    known = book.manifest.files
    whole, there = plan.bytes(), sum(known[name].bytes for name in known.keys() - set(missing))
    if DOCUMENTS in missing:
        there += put(book, DOCUMENTS, plan.documents_file(), {})
    numbers = [n for n in range(len(plan.counts)) if shard_name(n) in missing]
    graph = Graph("look") if device.lazy else Graph("features", (conf.batch, plan.packed.length))
    capturing = Capture(target, plan, batch=conf.batch)
    rows = sum(len(plan.rows(number)) for number in numbers)
    with device.expecting({graph}, log.info), Progress("capture", total=rows) as progress:
        for number in numbers:
            tensors, rounding = capturing.shard(
                number, lambda rows, tokens: progress.count(done=rows, tokens=tokens)
            )
            there += put(book, shard_name(number), tensors, rounding)
            said = f"{there / GB:.4g} of {whole / GB:.4g} GB"
            log.info("capture: %s written, %s", shard_name(number), said)


def put(
    book: Book, name: str, tensors: dict[str, Tensor], rounding: dict[str, dict[str, float]]
) -> int:
    """A whole file or none, then its checksum. Returns its bytes."""
    # not save_file: it writes under a name of its own, which a kill would leave behind
    data = safetensors.torch.save(tensors, metadata=METADATA)
    with writing(book.folder, remedy=GO_ON):
        with atomic_path(book.folder / name) as partial:
            partial.write_bytes(data)
        found = xxhash.xxh3_128_hexdigest(data)
        book.record(name, File(bytes=len(data), xxh3_128=found, rounding=rounding))
    return len(data)


def say_rounding(files: dict[str, File]) -> None:
    """How far what is stored is from what the target computed: of each layer the worst shard."""
    for layer in dict.fromkeys(layer for file in files.values() for layer in file.rounding):
        found = [file.rounding[layer] for file in files.values() if layer in file.rounding]
        relative, lost = (max(one[name] for one in found) for name in ("relative", "lost"))
        log.info(
            "rounding: %s by %.2f%% of a row's norm, %.1f%% of its values to 0",
            layer, 100 * relative, 100 * lost,
        )  # fmt: skip
        if lost > MUCH:
            log.warning("dtype: outliers leave few steps to other values of %s; try fp8", layer)


def say_done(book: Book) -> None:
    """What to do next: train, or wait for what is other workers'."""
    folder, wanted = book.folder, book.manifest.wanted
    there = sum((folder / name).exists() for name in wanted)
    if there < len(wanted):
        log.info(
            "store: %s has %d of its %d files; the others are other workers'",
            folder, there, len(wanted),
        )  # fmt: skip
    else:
        log.info("store: %s, to be trained from with data=captured data.path=%s", folder, folder)


if __name__ == "__main__":
    main()
