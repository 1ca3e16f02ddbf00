"""What a run learns from: packed rows, and a few prompts held back from them to measure it by."""

import hashlib
import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int
from rich.progress import track

from data.config import Author, Source
from data.conversations import Tokenised
from data.demo.prompts import training_prompts
from data.documents import Documents, Packed, read
from data.packing import answers_in, cut, pack
from data.store.reader import Store
from data.tokens import from_pair
from infer.generate import answers
from models.checkpoint import atomic_path
from models.console import CONSOLE
from models.sampling import SamplingConf
from models.target import Target
from train.config import TrainConf
from train.disk import refuse_full_disk
from train.parallel import Parallel

log = logging.getLogger(__name__)
TEXT_PROMPT = 16  # tokens of a plain text, whose answer begins with its second token


def training_rows(
    conf: TrainConf, target: Target, parallel: Parallel, store: Store | None
) -> tuple[Packed, list[list[int]]]:
    """The rows to train on, and the prompts to measure with."""
    skipped: Counter[str] = Counter()
    with parallel.main_first():
        if store is not None:
            documents = store.documents.head(conf.data.limit)
        elif conf.data.source is Source.demo:
            documents = _answered(conf, target, parallel)
        else:
            documents = read(conf.data, target.tokenizer, skipped)
    length, overlap = conf.data.length, conf.data.overlap
    kept, prompts = hold_back(documents, conf.eval_prompts, length)
    packed, report = pack(documents, length, overlap=overlap, among=kept)
    report.skipped = dict(skipped)
    log.info("data: %s", report)
    return packed, prompts


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


def hold_back(
    documents: Documents, count: int, length: int
) -> tuple[Int[np.ndarray, " kept"], list[list[int]]]:
    """The documents to learn from, and `count` prompts of others, spread evenly over the data.

    At most half of those that have an answer within a row's length.
    """
    numbers = np.arange(len(documents))
    usable = numbers[answers_in(documents, cut(documents.lengths, numbers, length, None)) > 0]
    held = usable[np.linspace(0, len(usable) - 1, min(count, len(usable) // 2), dtype=int)]
    if len(usable) and not len(held):
        log.warning(
            "data: too little to hold prompts back: the draft is measured on what it learns"
        )
        return numbers, [_prompt(documents[number]) for number in usable[:count].tolist()]
    return np.setdiff1d(numbers, held), [_prompt(documents[number]) for number in held.tolist()]


def _prompt(document: Tokenised) -> list[int]:
    """What comes before the first answer."""
    begins = document.answer.index(True)
    return document.ids[: begins if begins > 1 else TEXT_PROMPT]
