"""The prompts that a run holds back from its data, and the files in which it keeps them.

    outputs/train/RUN/held_out.jsonl    prompts of its report, of `infer.eval` and of its warm-up
    outputs/train/RUN/selection.jsonl   prompts that choose its checkpoint, of `infer.tune`

The demo is judged on prompts of its own, which its data never holds, and keeps no files.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from data.config import DEMO, Source
from data.eval_prompts.hold_out import HeldBack, hold_back
from data.mixture.held_out_rows import (
    FINAL,
    SELECTION,
    HeldOut,
    PromptRow,
    document_rows,
    name_of,
    prepared_rows,
)
from data.packing.documents import Documents
from infer.config import EvaluationConf
from infer.measure.prompt_choice import answer_tokens, settled
from models.checkpoint import atomic_path
from models.errors import UserError
from models.target.target import Target
from train.config import TrainConf
from train.run_dir import refuse_full_disk

log = logging.getLogger(__name__)


def hold_out(
    conf: TrainConf, target: Target, documents: Documents
) -> tuple[Int[np.ndarray, " learned"], HeldOut]:
    """Return the documents to learn from, and the prompts that are held out of them."""
    if conf.data.source is Source.demo:
        held = hold_back(documents, selection=conf.eval_prompts, final=0, length=conf.data.length)
        return held.learned, HeldOut(selection=document_rows(documents, held.selection, "the demo"))
    longest = _longest(conf, target)
    ready = prepared_rows(conf.data, target.tokenizer, conf.held_out_prompts, longest)
    held = hold_back(
        documents, selection=conf.eval_prompts, final=conf.held_out_prompts - len(ready),
        length=conf.data.length, longest=longest,
    )  # fmt: skip
    name = name_of(conf.data)
    if not held.selection:
        raise UserError(
            f"data.length: must leave prompts to choose a checkpoint by, got {conf.data.length}: "
            f"{name} has no prompt of at most {longest} tokens with an answer behind it in a row; "
            "raise it or lower evaluation.max_new_tokens"
        )
    final = ready + document_rows(documents, held.final, name)
    _say(conf, held, len(final), longest)
    return held.learned, HeldOut(
        selection=document_rows(documents, held.selection, name), final=final
    )


def judges_elsewhere(conf: TrainConf) -> bool:
    """Whether the report is made of prompts that are known without the run's data."""
    return conf.evaluation.prompts is not None or conf.data.source is Source.demo


def judged_on(conf: TrainConf, folder: Path) -> EvaluationConf:
    """Return the evaluation at the end of a run in this folder, with its prompts named."""
    prompts = conf.evaluation.prompts
    if prompts is None and conf.data.source is Source.demo:
        prompts = DEMO
    named = replace(conf.evaluation, prompts=prompts)
    return settled(named, [folder / "checkpoint"], conf.target)


def _longest(conf: TrainConf, target: Target) -> int:
    """Tokens of a prompt that a row of training and the target's positions have room for."""
    context = getattr(target.config, "max_position_embeddings", None)
    room = conf.data.length - 1
    if context is None:
        return room
    return min(room, context - answer_tokens(conf.evaluation, context, demo=False))


def _say(conf: TrainConf, held: HeldBack, final: int, longest: int) -> None:
    if held.too_long:
        log.info(
            "data: %d conversations cannot be held back: prompts of more than %d tokens, or no "
            "answer within data.length",
            held.too_long, longest,
        )  # fmt: skip
    if not final and conf.evaluation.prompts is None:
        raise UserError(
            f"held_out_prompts: must leave as many conversations to learn from, got {held.groups} "
            f"in {name_of(conf.data)} with a prompt of at most {longest} tokens; give more data, "
            "or prompts by evaluation.prompts=FILE"
        )
    if final < conf.held_out_prompts:
        log.warning(
            "data: %d of %d prompts are held out for the report, as half of the %d conversations "
            "stay to be learned",
            final, conf.held_out_prompts, held.groups,
        )  # fmt: skip


def keep(held: HeldOut, folder: Path) -> None:
    """Write the files of a run that is judged on its own data."""
    for name, text in _files(held).items():
        with refuse_full_disk(folder), atomic_path(folder / name) as partial:
            partial.write_text(text)


def refuse_others(held: HeldOut, folder: Path) -> None:
    """Raise UserError where a continued run would be judged on what it has learned already."""
    for name, text in _files(held).items():
        if (folder / name).exists() and (folder / name).read_text() != text:
            raise UserError(
                "data: must hold back the conversations that the run was started with, got others "
                f"than in {folder / name}, as the data or evaluation.max_new_tokens has changed; "
                "restore it, or use another run_name or resume=false"
            )


def _files(held: HeldOut) -> dict[str, str]:
    files: dict[str, list[PromptRow]] = {FINAL: held.final, SELECTION: held.selection}
    return {
        name: "".join(json.dumps(row) + "\n" for row in rows)
        for name, rows in files.items()
        if held.final
    }
