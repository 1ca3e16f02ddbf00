"""Packed rows that a run trains on, without the prompts that it is evaluated on.

Two things are computed from them: hashes of their prompts, in which held-out prompts are looked up
later, and the draft's reduced vocabulary, with its coverage of the answers.
"""

import hashlib
import json
import logging
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.chat.tokenization import iter_demo_documents
from data.config import DataConf, DataSource, DemoAnswerSource
from data.eval_prompts.contamination import (
    ANSWER_START_CHARS,
    PROMPT_HASHES_FILE,
    prompt_hashes,
)
from data.features.reader import FeatureStore
from data.mixture.held_out_rows import HeldOutPrompts
from data.packing.document_cache import read_cached_documents
from data.packing.documents import Documents, Packed
from data.packing.pack import DOCUMENT, pack_documents
from data.sources.row_formats import TokenizedDocument
from data.vocabulary.counts import (
    build_coverage_table,
    count_training_tokens,
    sizes_around,
)
from infer.engine.generate import generate_answers
from models.console import print_table, track_progress
from models.drafts.base import Draft
from models.files import PARTIAL_SUFFIX, atomic_path, write_text_atomically
from models.pages import render_markdown_table
from models.speculate.config import SamplingConf
from models.speculate.draft_vocab import required_token_ids
from models.target.target import Target
from train.config.run import TrainConf
from train.distributed.parallel import Parallel
from train.rows.held_out import hold_out
from train.run import report_full_disk

log = logging.getLogger(__name__)
VOCABULARY_FILE = "vocabulary.md"  # in a run folder; only the checkpoint lists the tokens
# Enough for the beginning of an answer: a character has at most 4 bytes, a token at least one.
MAX_START_TOKENS = 4 * ANSWER_START_CHARS


def load_training_rows(
    conf: TrainConf, target: Target, draft: Draft, parallel: Parallel
) -> tuple[Packed, HeldOutPrompts, FeatureStore | None]:
    """Return the rows to train on, the held-out prompts, and the store of the rows' features.

    The store is None if the target computes the features. Raise UserError if the data cannot be
    read, or leaves too few prompts to hold out.
    """
    store = None
    with parallel.main_first():
        if conf.data.source is DataSource.captured:
            store = FeatureStore.open(
                str(conf.data.path), target_hash=target.fingerprint,
                tokenizer_hash=target.tokenizer_fingerprint, needs=draft.needs,
                dtype=target.device.dtype,
                checksums=conf.data.checksums and parallel.is_main,  # once for all processes
            )  # fmt: skip
            documents = store.documents.head(conf.data.limit)
        elif conf.data.source is DataSource.demo:
            by_target = conf.data.answers.source is DemoAnswerSource.target
            answer_prompts = partial(_answer_with_target, conf, target, parallel)
            documents = Documents.from_documents(
                iter_demo_documents(
                    conf.data.answers, target.tokenizer, seed=conf.seed,
                    answer_prompts=answer_prompts if by_target else None,
                )
            )  # fmt: skip
        else:
            documents = read_cached_documents(
                conf.data, target.tokenizer, target.vocab_size, conf.output_dir
            )
        numbers, held_out = hold_out(conf, target, documents)
    packed, report = pack_documents(
        documents, conf.data.row_length, overlap=conf.data.overlap, document_numbers=numbers
    )
    log.info("data: %s", report)
    return packed, held_out, store


def _answer_with_target(
    conf: TrainConf, target: Target, parallel: Parallel, prompts: list[list[int]]
) -> list[list[int]]:
    """Return the target's answers, from a file of an earlier run or generated and written to it."""
    answers_conf = conf.data.answers
    sampling = SamplingConf(temperature=answers_conf.temperature, seed=conf.seed)
    inputs = [
        target.fingerprint, str(target.device.dtype), prompts, answers_conf.max_new_tokens,
        str(sampling),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    path = Path(conf.output_dir) / "answers" / f"{name}.json"
    is_cached = path.exists()
    if parallel.is_target_split:
        parallel.barrier()  # every process has looked before one of them writes
    if is_cached:
        log.info("data: %d answers by the target, from %s", len(prompts), path)
        return json.loads(path.read_text())
    log.info("data: the target answers %d prompts, kept in %s", len(prompts), path.parent)
    generated = track_progress(
        generate_answers(
            target.eager(), prompts, max_new_tokens=answers_conf.max_new_tokens, sampling=sampling,
            batch=answers_conf.batch,
        ),
        "answers", total=len(prompts),
    )  # fmt: skip
    answers = [ids for _, ids in sorted(generated)]
    if parallel.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            report_full_disk(path.parent),
            # Runs of other names may write the same file at the same time.
            tempfile.TemporaryDirectory(dir=path.parent, suffix=PARTIAL_SUFFIX) as own_folder,
        ):
            write_text_atomically(path, json.dumps(answers), partial_dir=Path(own_folder))
    return answers


def write_prompt_hashes(rows: Packed, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the hashes of all prompts and answer starts in the rows to the run folder."""
    hashes = {
        prompt_hash
        for number in np.unique(rows.table[:, DOCUMENT]).tolist()
        for prompt_hash in _hash_document(rows.documents[number], tokenizer)
    }
    with (
        report_full_disk(folder),
        atomic_path(folder / PROMPT_HASHES_FILE) as partial,
        partial.open("wb") as stream,
    ):
        np.save(stream, np.array(sorted(hashes), np.uint64))


def _hash_document(document: TokenizedDocument, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the hashes of the first question, the text before the first answer, and its beginning.

    A document with at most one token before its answer is a plain text, of which only the beginning
    is hashed.
    """
    answer_start = document.answer.index(True)
    text_start = 0 if answer_start <= 1 else answer_start
    texts = [document.ids[:answer_start], document.ids[text_start : text_start + MAX_START_TOKENS]]
    prompt, answer = tokenizer.batch_decode(texts, skip_special_tokens=True)
    known = [document.first_question] if document.first_question else []
    return [*known, *prompt_hashes(prompt, answer)]


def choose_vocabulary(
    draft: Draft, target: Target, rows: Packed, conf: DataConf, folder: Path | None
) -> None:
    """Let the draft choose its vocabulary by the tokens of the answers, and print its coverage.

    Vocabularies of about half and double the size are printed for comparison. Held-out documents
    are not counted.

    `folder`: where the table is also written; None in processes that print and write nothing.
    """
    counts = count_training_tokens(
        conf, rows.documents, rows.document_numbers, target.vocab_size,
        None if draft.kept_ids is None else target.tokenizer, target.tokenizer_fingerprint,
    )  # fmt: skip
    required_ids = required_token_ids(target.tokenizer)
    figures = draft.prepare(counts.total, target=target, required_ids=required_ids)
    for name, value in figures.items():
        log.info("draft: %s %.4g", name, value)
    if draft.kept_ids is not None and folder is not None:
        sizes = sizes_around(len(draft.kept_ids), len(required_ids), target.vocab_size)
        coverage = build_coverage_table(counts, sizes, required_ids)
        print_table(coverage[0], coverage[1:])
        text = render_markdown_table(coverage[0], coverage[1:])
        with report_full_disk(folder):
            (folder / VOCABULARY_FILE).write_text(text + "\n")
