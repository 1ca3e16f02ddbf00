"""Capture the features that a draft needs of its target, shard by shard, into a store."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import safetensors.torch
import xxhash
from torch import Tensor

from conf.entry import config_to_yaml
from data.config import DataConf, DataSource
from data.features.capture_progress import GB, CaptureProgress
from data.features.config import CaptureConf
from data.features.manifest import DOCUMENTS_FILE, FileRecord, StoreSpec, shard_name
from data.features.plan import CapturePlan
from data.features.schema import build_schema
from data.features.writer import ShardBuilder
from data.packing.document_cache import read_cached_documents
from data.preview import check_and_read_first_rows, preview_rows
from data.progress import RowProgress
from models.checkpoint import tokenizer_fingerprint
from models.device.device import Device
from models.device.graph_budget import Graph
from models.errors import require
from models.files import atomic_path, partial_directory, report_disk_errors, write_text_atomically
from models.lock import acquire_lock
from models.meta_model import MetaTarget, build_meta_draft, build_meta_target
from models.target.precision import build_device
from models.target.pretrained import check_pretrained, load_target, load_tokenizer, read_vocab_size

log = logging.getLogger("data.capture")
DEMO_FOLDER = Path("outputs/prepare/demo")
RESUME_HINT = "make room and repeat the command: it resumes with the missing files"
MAX_ZEROED_SHARE = 0.1  # of a layer's values; int8 rounds 1 % of normally distributed values to 0


def capture_features(conf: CaptureConf, *, command: str) -> Path:
    """Capture the files that the store lacks and return its folder.

    `command` is recorded in the manifest as the command that resumes this capture.
    """
    conf.data.check_target(conf.target)
    conf = replace(conf, data=resolve_demo_data(conf.data))
    require(
        conf.data.source is not DataSource.captured,
        "data.source: must be documents, got captured, which are features already; give "
        "data=prepared",
    )
    rows = check_and_read_first_rows(
        conf.data,
        partial(check_pretrained, conf.target),
        partial(check_pretrained, conf.draft.pretrained),
    )
    preview_rows(conf.data, conf.target, rows)
    device = build_device(conf.device, conf.target)
    conf.data.check_row_length(device.length_multiple, on=device.instance_type)
    meta_target = build_meta_target(conf.target, device.dtype)
    tokenizer = load_tokenizer(conf.target)
    plan = plan_capture(conf, meta_target, tokenizer)
    spec = build_store_spec(plan, conf, device, tokenizer_fingerprint(tokenizer))
    progress = CaptureProgress(conf, spec, plan.packed.documents, command)
    missing = progress.missing_files()
    progress.check_disk_space(plan)
    if missing:
        with report_disk_errors(progress.folder):
            progress.folder.mkdir(parents=True, exist_ok=True)
            acquire_lock(progress.folder)
            write_text_atomically(progress.folder / "config.yaml", config_to_yaml(conf))
        write_missing_files(missing, plan, progress, conf, device)
    log_rounding(progress.manifest.files)
    log.info(
        "store: %s; train from it with data=captured data.path=%s", progress.folder, progress.folder
    )
    return progress.folder


def resolve_demo_data(data: DataConf) -> DataConf:
    """Return the settings, with data.prepare's folder in place of the demo's prompts.

    Raise UserError if that folder does not exist.
    """
    if data.source is not DataSource.demo:
        return data
    require(
        DEMO_FOLDER.exists(),
        f"data.source: the demo must be prepared first, got no {DEMO_FOLDER}; run `python -m "
        "data.prepare`, then this command again",
    )
    return replace(data, source=DataSource.prepared, path=str(DEMO_FOLDER))


def plan_capture(conf: CaptureConf, meta_target: MetaTarget, tokenizer) -> CapturePlan:
    """Read and pack the documents, return the plan of their shards and log its size.

    Raise UserError if the draft's features cannot be stored.
    """
    needs = build_meta_draft(conf.draft, meta_target, loss=conf.loss, seed=0).needs
    schema = build_schema(
        conf, needs, hidden_size=meta_target.hidden_size, vocab_size=meta_target.vocab_size
    )
    documents = read_cached_documents(
        conf.data, tokenizer, read_vocab_size(conf.target), conf.output_dir
    )
    plan, report = CapturePlan.from_documents(
        documents, schema, length=conf.data.row_length,
        overlap=conf.data.overlap, batch=conf.batch, shard_mb=conf.shard_mb,
    )  # fmt: skip
    log.info("data: %s", report)
    tokens, supervised = plan.shard_token_counts.sum(0)
    bytes_per_token = plan.total_bytes / tokens
    log.info(
        "store: %.4g GB in %d shards, %.0f bytes per token (%.3f of four bf16 hidden states at "
        "every token); %.0f%% of the tokens are supervised",
        plan.total_bytes / GB, len(plan.shard_token_counts), bytes_per_token,
        # Four values of 2 bytes.
        bytes_per_token / (8 * meta_target.hidden_size), 100 * supervised / tokens,
    )  # fmt: skip
    return plan


def build_store_spec(
    plan: CapturePlan, conf: CaptureConf, device: Device, tokenizer_hash: str
) -> StoreSpec:
    documents = plan.packed.documents
    tokens, supervised = plan.shard_token_counts.sum(0).tolist()
    return StoreSpec(
        target_sha256="",  # set once the target is loaded
        tokenizer_sha256=tokenizer_hash, computed_in=str(device.dtype).removeprefix("torch."),
        layout=plan.schema, length=conf.data.row_length, overlap=conf.data.overlap,
        batch=conf.batch, documents=len(documents), tokens=tokens, supervised=supervised,
        documents_xxh3=documents.content_hash(),
        shards=len(plan.shard_token_counts),
    )  # fmt: skip


def write_missing_files(
    missing: list[str],
    plan: CapturePlan,
    progress: CaptureProgress,
    conf: CaptureConf,
    device: Device,
) -> None:
    """Write the missing files, one after another, and record each in the manifest."""
    target = load_target(conf.target, device)
    progress.set_target(target.fingerprint)
    if DOCUMENTS_FILE in missing:
        write_store_file(progress, DOCUMENTS_FILE, plan.document_tensors(), {})
    shards = [n for n in range(len(plan.shard_token_counts)) if shard_name(n) in missing]
    graphs = device.choose_graphs(
        whole=[Graph("look")], parts=[Graph("features", (conf.batch, plan.packed.length))]
    )
    builder = ShardBuilder(target, plan, batch=conf.batch)
    bar = RowProgress("capture", total=sum(len(plan.shard_rows(shard)) for shard in shards))
    with device.expect_graphs(graphs, log.info), bar:
        for shard in shards:
            tensors, rounding = builder.build_shard(
                shard, lambda rows, tokens: bar.count(done=rows, tokens=tokens)
            )
            write_store_file(progress, shard_name(shard), tensors, rounding)
            log.info(
                "capture: %s written, %.4g of %.4g GB",
                shard_name(shard), progress.manifest.total_bytes / GB, plan.total_bytes / GB,
            )  # fmt: skip


def write_store_file(
    progress: CaptureProgress,
    name: str,
    tensors: dict[str, Tensor],
    rounding: dict[str, dict[str, float]],
) -> None:
    """Write one file atomically and record its checksum."""
    # save_file would write under a temporary name of its own, which a kill leaves behind.
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    with report_disk_errors(progress.folder, remedy=RESUME_HINT):
        with (
            partial_directory(progress.partial_dir) as partial_dir,
            atomic_path(progress.folder / name, partial_dir=partial_dir) as partial,
        ):
            partial.write_bytes(data)
        progress.record(
            name,
            FileRecord(
                bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data), rounding=rounding
            ),
        )


def log_rounding(files: dict[str, FileRecord]) -> None:
    """Log the rounding error of each layer's worst shard; warn if too many values became 0."""
    for layer in dict.fromkeys(layer for file in files.values() for layer in file.rounding):
        errors = [file.rounding[layer] for file in files.values() if layer in file.rounding]
        relative, lost = (max(error[name] for error in errors) for name in ("relative", "lost"))
        log.info(
            "rounding: %s by %.2f%% of a row's norm, %.1f%% of its values to 0",
            layer, 100 * relative, 100 * lost,
        )  # fmt: skip
        if lost > MAX_ZEROED_SHARE:
            log.warning(
                "dtype: outliers of %s leave few quantization steps for its other values; try fp8",
                layer,
            )
