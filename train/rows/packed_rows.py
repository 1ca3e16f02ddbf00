"""Packed rows that a run trains on, without the prompts that it is evaluated on."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

from rich.progress import track

from data.config import DataSource, DemoAnswerSource
from data.demo.prompts import training_prompts
from data.features.reader import FeatureStore
from data.mixture.held_out_rows import HeldOutPrompts
from data.packing.documents import Documents, Packed, read_documents
from data.packing.pack import pack_documents
from data.sources.tokenized import document_from_pair
from infer.engine.generate import generate_answers
from models.console import CONSOLE
from models.files import atomic_path
from models.speculate.sampling import SamplingConf
from models.target.target import Target
from train.config import TrainConf
from train.distributed.parallel import Parallel
from train.rows.held_out import hold_out
from train.run_dir import refuse_full_disk

log = logging.getLogger(__name__)


def load_training_rows(
    conf: TrainConf, target: Target, parallel: Parallel, store: FeatureStore | None
) -> tuple[Packed, HeldOutPrompts]:
    """Return the rows to train on, and the prompts that are held out of them."""
    with parallel.main_first():
        if store is not None:
            documents = store.documents.head(conf.data.limit)
        elif conf.data.source is DataSource.demo:
            documents = _build_demo_documents(conf, target, parallel)
        else:
            documents = read_documents(conf.data, target.tokenizer)
        numbers, held_out = hold_out(conf, target, documents)
    packed, report = pack_documents(
        documents, conf.data.length, overlap=conf.data.overlap, document_numbers=numbers
    )
    log.info("data: %s", report)
    return packed, held_out


def _build_demo_documents(conf: TrainConf, target: Target, parallel: Parallel) -> Documents:
    """Build the demo's prompts with answers, by the target or from the corpus."""
    answers_conf = conf.data.answers
    prompts = training_prompts(answers_conf.prompts, seed=conf.seed)
    prompt_ids: list[list[int]] = target.tokenizer([prompt.text for prompt in prompts])["input_ids"]
    if answers_conf.by is DemoAnswerSource.corpus:
        continuations = target.tokenizer([prompt.continuation for prompt in prompts])["input_ids"]
        answers = [tokens[: answers_conf.max_new_tokens] for tokens in continuations]
    else:
        answers = _answer_with_target(conf, target, prompt_ids, parallel)
    return Documents.from_documents(
        replace(document_from_pair(tokens, answer), category=prompt.category)
        for prompt, tokens, answer in zip(prompts, prompt_ids, answers, strict=True)
    )


def _answer_with_target(
    conf: TrainConf, target: Target, prompts: list[list[int]], parallel: Parallel
) -> list[list[int]]:
    """Generate the target's answers, or read those that an earlier run has written."""
    answers_conf = conf.data.answers
    sampling = SamplingConf(temperature=answers_conf.temperature, seed=conf.seed)
    inputs = [
        target.fingerprint, str(target.device.dtype), prompts, answers_conf.max_new_tokens,
        str(sampling),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    path = Path(conf.output_dir) / "answers" / f"{name}.json"
    is_cached = path.exists()
    parallel.barrier_if_split()  # every process has looked before one of them writes
    if is_cached:
        answers = json.loads(path.read_text())
        log.info("data: %d answers by the target, from %s", len(answers), path)
        return answers
    log.info("data: the target answers %d prompts, kept in %s", len(prompts), path.parent)
    generated = generate_answers(
        target.eager(), prompts, max_new_tokens=answers_conf.max_new_tokens, sampling=sampling,
        batch=answers_conf.batch,
    )  # fmt: skip
    quiet = not CONSOLE.is_terminal
    tracked = track(generated, "answers", total=len(prompts), console=CONSOLE, disable=quiet)
    answers = [ids for _, ids in sorted(tracked)]
    if parallel.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        with refuse_full_disk(path.parent), atomic_path(path) as partial:
            partial.write_text(json.dumps(answers))
    return answers
