"""What a run learns from: packed rows, and a few prompts held back from them to measure it by."""

import hashlib
import json
import logging
from dataclasses import fields
from pathlib import Path

from rich.progress import track

from data.batches import Packed, PackReport, pack, prepare
from data.config import Author, Source
from data.demo.prompts import training_prompts
from data.tokens import from_pair
from infer.generate import answers
from models.checkpoint import atomic_path
from models.console import CONSOLE
from models.drafts.base import Batch
from models.sampling import SamplingConf
from models.target import Target
from train.config import TrainConf
from train.disk import refuse_full_disk
from train.parallel import Parallel

log = logging.getLogger(__name__)
TEXT_PROMPT = 16  # tokens of a plain text, whose answer begins with its second token


def training_rows(
    conf: TrainConf, target: Target, parallel: Parallel
) -> tuple[Packed, list[list[int]]]:
    """The rows to train on, and the prompts to measure with."""
    with parallel.main_first():
        if conf.data.source is Source.demo:
            packed, report = _answered(conf, target, parallel)
        else:
            packed, report = prepare(conf.data, target.tokenizer)
    log.info("data: %s", report)
    return hold_back(packed, conf.eval_prompts)


def _answered(conf: TrainConf, target: Target, parallel: Parallel) -> tuple[Packed, PackReport]:
    """The demo's prompts with their answers, by the target or as the texts themselves go on."""
    wanted = conf.data.answers
    drawn = training_prompts(wanted.prompts, seed=conf.seed)
    prompts: list[list[int]] = target.tokenizer([prompt.text for prompt in drawn])["input_ids"]
    if wanted.by is Author.corpus:
        rests = target.tokenizer([prompt.rest for prompt in drawn])["input_ids"]
        answered = [ids[: wanted.max_new_tokens] for ids in rests]
    else:
        answered = _by_target(conf, target, prompts, parallel)
    pairs = (from_pair(*pair) for pair in zip(prompts, answered, strict=True))
    return pack(pairs, length=conf.data.length)


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


def hold_back(rows: Packed, count: int) -> tuple[Packed, list[list[int]]]:
    """Take rows away from the end until their documents give `count` prompts."""
    kept, prompts = len(rows), []
    while len(prompts) < count and kept > 1:
        kept -= 1
        prompts += _prompts(rows.batch([kept]))
    if not prompts:
        log.warning(
            "data: too little to hold prompts back: the draft is measured on what it learns"
        )
        return rows, _prompts(rows.batch([0]))[:count]
    remaining = rows.batch(list(range(kept)))
    packed = Packed(**{f.name: getattr(remaining, f.name) for f in fields(Batch)})
    return packed, prompts[:count]


def _prompts(row: Batch) -> list[list[int]]:
    """What comes before the first answer of each document."""
    found = []
    for number in range(int(row.document.max()) + 1):
        inside = row.document[0] == number
        ids, answer = row.ids[0, inside].tolist(), row.answer[0, inside].tolist()
        begins = answer.index(True)
        found.append(ids[: begins if begins > 1 else TEXT_PROMPT])
    return found
