"""Capture the features that a draft needs of its target, shard by shard, into a store."""

import logging
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from conf.entry import config_to_yaml
from data.config import CaptureConf, DataSource
from data.document_cache import read_cached_documents
from data.features.manifest import DOCUMENTS_FILE, FileRecord, Manifest, StoreSpec, shard_name
from data.features.plan import CapturePlan
from data.features.schema import build_schema
from data.features.writer import ShardBuilder
from data.packing.pack import check_positions
from data.preview import preview_data
from data.sources.licenses import describe_licenses
from models.checkpoints.fingerprints import tokenizer_fingerprint
from models.device.device import Device
from models.device.graph_budget import Graph
from models.io.console import IS_MAIN_PROCESS, track_progress
from models.io.errors import require
from models.io.files import atomic_path, report_disk_errors, write_text_atomically
from models.io.lock import acquire_lock
from models.meta_model import MetaTarget, build_meta_draft, build_meta_target
from models.parallel.processes import leave_processes
from models.targets.loading import open_target
from models.targets.precision import build_device
from models.targets.pretrained import check_pretrained, load_tokenizer, read_context_length, read_vocab_size

log = logging.getLogger("data.capture")
GB = 10**9
RESUME_HINT = "make room and repeat the command: it resumes with the missing files"
MAX_ZEROED_SHARE = 0.1  # of a layer's values; int8 rounds 1 % of normally distributed values to 0


def capture_features(conf: CaptureConf, *, command: str) -> Path:
    """Capture the files that the store lacks and return its folder; the manifest records the `command` that resumes."""
    require(
        conf.data.source not in (DataSource.demo, DataSource.captured),
        f"data.source: must be documents, got {conf.data.source.value}; run `python -m data.prepare` and give "
        "data=prepared data.path=outputs/prepare/RUN",
    )
    models = (conf.target, conf.draft.pretrained)
    preview_data(conf.data, conf.target, *(partial(check_pretrained, model) for model in models))
    device = build_device(conf.device, conf.target)
    conf.data.check_row_length(device.length_multiple, on=device.instance_type)
    meta_target = build_meta_target(conf.target, device.dtype)
    tokenizer = load_tokenizer(conf.target)
    plan = plan_capture(conf, meta_target, tokenizer)
    folder = Path(conf.output_dir) / conf.run_name
    tokenizer_hash = tokenizer_fingerprint(tokenizer)
    manifest = build_manifest(
        plan, conf, computed_in=device.dtype, tokenizer_hash=tokenizer_hash, command=command
    ).resume(folder)
    damaged = dict(manifest.find_damaged(folder, checksums=conf.checksums))
    for name, damage in damaged.items():
        log.warning("%s is %s: capturing it again", folder / name, damage)
    missing = [name for name in manifest.file_names if name in damaged or name not in manifest.files]
    if missing:
        with report_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if IS_MAIN_PROCESS:
                acquire_lock(folder)
                write_text_atomically(folder / "config.yaml", config_to_yaml(conf))
        write_missing_files(missing, plan, manifest, conf, device)
        leave_processes()
    log.info("store: %s; train from it with data=captured data.path=%s", folder, folder)
    return folder


def plan_capture(conf: CaptureConf, meta_target: MetaTarget, tokenizer) -> CapturePlan:
    """Return the plan of the documents' shards and log its size; raise UserError for features that cannot be stored."""
    needs = build_meta_draft(conf.draft, meta_target).needs
    schema = build_schema(conf, needs, hidden_size=meta_target.hidden_size, vocab_size=meta_target.vocab_size)
    documents = read_cached_documents(conf.data, tokenizer, read_vocab_size(conf.target), conf.output_dir)
    check_positions(documents, conf.data.row_length, read_context_length(conf.target))
    plan, report = CapturePlan.from_documents(documents, schema, conf)
    log.info("data: %s", report)
    tokens, supervised = plan.token_counts
    num_bytes = schema.num_bytes(tokens, supervised)
    log.info(
        "store: %.4g GB in %d shards, %.0f bytes per token; %.0f%% of the tokens are supervised",
        num_bytes / GB,
        len(plan.shard_token_counts),
        num_bytes / tokens,
        100 * supervised / tokens,
    )
    return plan


def build_manifest(
    plan: CapturePlan, conf: CaptureConf, *, computed_in: torch.dtype, tokenizer_hash: str, command: str
) -> Manifest:
    """Return the manifest of a capture that has written no file."""
    documents = plan.packed.documents
    tokens, supervised = plan.token_counts
    spec = StoreSpec(
        tokenizer_sha256=tokenizer_hash,
        computed_in=str(computed_in).removeprefix("torch."),
        schema=plan.schema,
        length=conf.data.row_length,
        overlap=conf.data.overlap,
        batch=conf.batch,
        documents=len(documents),
        tokens=tokens,
        supervised=supervised,
        documents_xxh3=documents.content_hash(),
        shards=len(plan.shard_token_counts),
        rows_per_shard=plan.rows_per_shard,
    )
    return Manifest(
        spec=spec,
        target=conf.target.path or conf.target.name,
        method=conf.draft.method,
        command=command,
        categories=documents.categories,
        languages=documents.languages,
        license=describe_licenses(conf.data),
    )


def write_missing_files(
    missing: list[str], plan: CapturePlan, manifest: Manifest, conf: CaptureConf, device: Device
) -> None:
    """Write the missing files, one after another, and record each in the manifest.

    Raises UserError if the disk lacks space for them, or if the other files are of another target.
    """
    folder = Path(conf.output_dir) / conf.run_name
    shards = [n for n in range(len(plan.shard_token_counts)) if shard_name(n) in missing]
    needed = sum(plan.schema.num_bytes(*plan.shard_token_counts[n].tolist()) for n in shards)
    free = shutil.disk_usage(folder).free
    require(
        needed <= free,
        f"output_dir: must have room for {needed / GB:.4g} GB, got {free / GB:.4g} GB free in {folder}; take fewer "
        "documents by data.limit, dtype=int8 or teacher=topk, or choose another output_dir",
    )
    # Collective, so that no process writes before all have read what is missing.
    target = open_target(conf.target, device, tensor=conf.parallel.tensor)
    require(
        manifest.target_sha256 in ("", target.fingerprint),
        f"run_name: must name a new store or one of this target, got {folder}, whose target has "
        "other weights; choose another run_name",
    )
    manifest = replace(manifest, target_sha256=target.fingerprint, tables_sha256=target.tables_fingerprint)
    if DOCUMENTS_FILE in missing:
        write_store_file(manifest, folder, DOCUMENTS_FILE, plan.document_tensors())
    # A lazy device records the target's pass and what is stored of it as one graph.
    graphs = {
        Graph("compute_stored_features") if device.lazy else Graph("run_target", (conf.batch, plan.packed.length))
    }
    builder = ShardBuilder(target, plan, batch=conf.batch)
    num_batches = sum(len(builder.list_batches(shard)) for shard in shards)
    steps = iter(track_progress(range(num_batches), "capture"))
    with device.expect_graphs(graphs, log.info):
        for shard in shards:
            tensors = builder.build_shard(shard, count_batch=lambda: next(steps, None))
            write_store_file(manifest, folder, shard_name(shard), tensors)
    for layer, (relative, lost) in builder.measure_rounding().items():
        log.info("rounding: %s by %.2f%% of a row's norm, %.1f%% of its values to 0", layer, 100 * relative, 100 * lost)
        if lost > MAX_ZEROED_SHARE:
            log.warning("dtype: outliers of %s leave few quantization steps for its other values; try fp8", layer)


def write_store_file(manifest: Manifest, folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Write one file atomically, then record its checksum: the file is valid from now on."""
    if not IS_MAIN_PROCESS:  # the processes of a split target compute the same
        return
    # save_file would write under a temporary name of its own, which a kill leaves behind.
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    with report_disk_errors(folder, remedy=RESUME_HINT):
        with atomic_path(folder / name) as partial:
            partial.write_bytes(data)
        manifest.files[name] = FileRecord(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
        manifest.write(folder)
