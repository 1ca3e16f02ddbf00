"""Packed rows that a run trains on, without the prompts that it is evaluated on."""

import hashlib
import json
import logging
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from data.chat.tokenization import iter_demo_documents
from data.config import DataSource, DemoAnswerSource
from data.document_cache import read_cached_documents
from data.eval_prompts.held_out_files import HeldOutPrompts
from data.features.reader import FeatureStore
from data.packing.documents import Documents, Packed
from data.packing.pack import check_positions, pack_documents
from infer.engine.answers import generate_answers
from models.drafts.base import Draft
from models.io.console import track_progress
from models.io.files import PARTIAL_SUFFIX, write_text_atomically
from models.targets.target import Target
from models.trees.sampling_config import SamplingConf
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.rows.held_out import hold_out

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingRows:
    """The rows to train on, and what the run is measured by."""

    rows: Packed
    held_out: HeldOutPrompts
    selection: Packed  # documents whose prompts choose the checkpoint
    store: FeatureStore | None  # of the features; None: the target computes them


def load_training_rows(conf: TrainConf, target: Target, draft: Draft, parallel: Parallel) -> TrainingRows:
    """Return the rows to train on; raise UserError for data that cannot be read or leaves too few prompts."""
    store = None
    with parallel.main_first():
        if conf.data.source is DataSource.captured:
            store = FeatureStore(
                str(conf.data.path),
                target_hash=target.fingerprint,
                tokenizer_hash=target.tokenizer_fingerprint,
                needs=draft.needs,
                dtype=target.device.dtype,
                checksums=conf.data.checksums and parallel.is_main,  # once for all processes
            )
            documents = store.documents.head(conf.data.limit)
        elif conf.data.source is DataSource.demo:
            by_target = conf.data.demo.source is DemoAnswerSource.target
            answer_prompts = partial(_answer_with_target, conf, target, parallel) if by_target else None
            demo = iter_demo_documents(conf.data.demo, target.tokenizer, seed=conf.seed, answer_prompts=answer_prompts)
            documents = Documents.from_documents(demo)
        else:
            documents = read_cached_documents(conf.data, target.tokenizer, target.vocab_size, conf.output_dir)
        check_positions(documents, conf.data.row_length, getattr(target.config, "max_position_embeddings", None))
        split, held_out = hold_out(conf, target, documents)
    pack = partial(pack_documents, documents, conf.data.row_length, overlap=conf.data.overlap)
    packed, report = pack(document_numbers=split.training)
    log.info("data: %s", report)
    selection, _ = pack(document_numbers=np.array(split.selection))
    return TrainingRows(rows=packed, held_out=held_out, selection=selection, store=store)


def _answer_with_target(
    conf: TrainConf, target: Target, parallel: Parallel, prompts: list[list[int]]
) -> list[list[int]]:
    """Return the target's answers, from a file of an earlier run or generated and written to it."""
    demo = conf.data.demo
    sampling = SamplingConf(temperature=demo.temperature, seed=conf.seed)
    inputs = [target.fingerprint, str(target.device.dtype), prompts, demo.max_new_tokens, str(sampling)]
    name = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    path = Path(conf.output_dir) / "answers" / f"{name}.json"
    is_cached = path.exists()
    if parallel.is_target_split:
        parallel.barrier()  # every process has looked before one of them writes
    if is_cached:
        log.info("data: %d answers by the target, from %s", len(prompts), path)
        return json.loads(path.read_text())
    log.info("data: the target answers %d prompts, kept in %s", len(prompts), path.parent)
    limit, model = demo.max_new_tokens, target.eager()
    generated = generate_answers(model, prompts, max_new_tokens=limit, sampling=sampling, batch=demo.batch)
    answers = [ids for _, ids in sorted(track_progress(generated, "answers", total=len(prompts)))]
    if parallel.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Runs of other names may write the same file at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent, suffix=PARTIAL_SUFFIX) as own_folder:
            write_text_atomically(path, json.dumps(answers), partial_dir=Path(own_folder))
    return answers
