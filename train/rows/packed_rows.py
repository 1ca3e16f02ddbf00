"""What a run learns from: packed rows. The prompts that it is judged by are held back from them."""

import hashlib
import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.progress import track

from data.config import Author, Source
from data.demo.prompts import training_prompts
from data.features.reader import Store
from data.mixture.held_out_rows import HeldOut
from data.packing.documents import Documents, Packed, read
from data.packing.pack import pack
from data.sources.tokenized import from_pair
from infer.engine.generate import answers
from models.checkpoint import atomic_path
from models.console import CONSOLE
from models.speculate.sampling import SamplingConf
from models.target.target import Target
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.rows.held_out import hold_out
from train.run_dir import refuse_full_disk

log = logging.getLogger(__name__)


def training_rows(
    conf: TrainConf, target: Target, parallel: Parallel, store: Store | None
) -> tuple[Packed, HeldOut]:
    """Return the rows to train on, and the prompts that are held back from them."""
    skipped: Counter[str] = Counter()
    with parallel.main_first():
        if store is not None:
            documents = store.documents.head(conf.data.limit)
        elif conf.data.source is Source.demo:
            documents = _answered(conf, target, parallel)
        else:
            documents = read(conf.data, target.tokenizer, skipped)
        learned, held = hold_out(conf, target, documents)
    packed, report = pack(documents, conf.data.length, overlap=conf.data.overlap, among=learned)
    report.skipped = dict(skipped)
    log.info("data: %s", report)
    return packed, held


def _answered(conf: TrainConf, target: Target, parallel: Parallel) -> Documents:
    """The demo's prompts with their answers, by the target or as the texts themselves go on."""
    wanted = conf.data.answers
    drawn = training_prompts(wanted.prompts, seed=conf.seed)
    prompts: list[list[int]] = target.tokenizer([prompt.text for prompt in drawn])["input_ids"]
    if wanted.by is Author.corpus:
        rests = target.tokenizer([prompt.rest for prompt in drawn])["input_ids"]
        answered = [ids[: wanted.max_new_tokens] for ids in rests]
    else:
        answered = _by_target(conf, target, prompts, parallel)
    return Documents.of(
        replace(from_pair(ids, answer), category=prompt.category)
        for prompt, ids, answer in zip(drawn, prompts, answered, strict=True)
    )


def _by_target(
    conf: TrainConf, target: Target, prompts: list[list[int]], parallel: Parallel
) -> list[list[int]]:
    """The target's answers; they are kept for the next run."""
    wanted = conf.data.answers
    sampling = SamplingConf(temperature=wanted.temperature, seed=conf.seed)
    made_from = [
        target.fingerprint, str(target.device.dtype), prompts, wanted.max_new_tokens, str(sampling)
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    kept = Path(conf.output_dir) / "answers" / f"{name}.json"
    there = kept.exists()
    parallel.settle()  # nobody may find what another process writes from here on
    if there:
        answered = json.loads(kept.read_text())
        log.info("data: %d answers by the target, from %s", len(answered), kept)
        return answered
    log.info("data: the target answers %d prompts, kept in %s", len(prompts), kept.parent)
    made = answers(
        target.eager(), prompts, max_new_tokens=wanted.max_new_tokens, sampling=sampling,
        batch=wanted.batch,
    )  # fmt: skip
    quiet = not CONSOLE.is_terminal
    shown = track(made, "answers", total=len(prompts), console=CONSOLE, disable=quiet)
    answered = [ids for _, ids in sorted(shown)]
    if parallel.main:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with refuse_full_disk(kept.parent), atomic_path(kept) as partial:
            partial.write_text(json.dumps(answered))
    return answered
